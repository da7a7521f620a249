"""Sampling a node from its own row: the filters and the distribution."""

import pytest
import torch
from ddtree_engine.sglang_plugin.sampling import sample_rows
from scipy.stats import chisquare

VOCABULARY = 12
DRAWS = 20_000


@pytest.fixture
def logits():
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))


def draw(logits, **filters):
    torch.manual_seed(0)
    rows = logits.expand(DRAWS, -1)
    temperatures = torch.full((DRAWS, 1), 0.8)
    filters = {
        name: value if name == "most" else torch.full((DRAWS,), value) for name, value in filters.items()
    }
    return torch.bincount(sample_rows(rows, temperatures, **filters), minlength=VOCABULARY)


def expected(logits, keep):
    probs = torch.softmax(logits / 0.8, -1)
    return torch.where(keep(probs), probs, 0.0)


FILTERS = {
    "none": ({}, lambda probs: probs > 0),
    "top_k": ({"top_ks": 4}, lambda probs: probs >= probs.sort(descending=True).values[3]),
    "top_k, bounded": (
        {"top_ks": 4, "most": 6},
        lambda probs: probs >= probs.sort(descending=True).values[3],
    ),
    "top_p": (
        {"top_ps": 0.7},
        lambda probs: torch.tensor([float(probs[probs > p].sum()) <= 0.7 for p in probs]),
    ),
    "min_p": ({"min_ps": 0.3}, lambda probs: probs >= probs.max() * 0.3),
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name, logits):
    filters, keep = FILTERS[name]
    counts = draw(logits, **filters)
    wanted = expected(logits, keep)
    assert (counts[wanted == 0] == 0).all()
    kept = wanted > 0
    share = wanted[kept].double() / wanted[kept].double().sum()
    assert chisquare(counts[kept].numpy(), (share * DRAWS).numpy()).pvalue > 0.001


def test_the_goodness_of_fit_sees_a_wrong_temperature(logits):
    counts = draw(logits * 1.1)
    share = torch.softmax(logits.double() / 0.8, -1)
    assert chisquare(counts.numpy(), (share * DRAWS).numpy()).pvalue < 0.001


def test_one_candidate_is_greedy(logits):
    counts = draw(logits, top_ks=1)
    assert counts[logits.argmax()] == DRAWS


def test_rows_have_their_own_parameters():
    logits = torch.tensor([[0.0, 5.0, 4.9], [0.0, 5.0, 4.9]])
    noise = torch.tensor([[1.0, 1.0, 0.01], [1.0, 1.0, 0.01]])
    tokens = sample_rows(logits, torch.ones(2, 1), top_ks=torch.tensor([1, 3]), noise=noise)
    assert tokens.tolist()[0] == 1
