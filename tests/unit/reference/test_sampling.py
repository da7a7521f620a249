"""Sampling: filters by definition, draws by seed and position, and the distribution through a tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ddtree_engine.reference.sampling import Sampler, uniform
from ddtree_engine.tree import build_tree, walk
from scipy import stats

VOCABULARY, BLOCK, DRAWS = 7, 4, 20_000


def filtered(logits, temperature, top_k, top_p, min_p):
    """The kept distribution, token by token from the definition."""
    weights = [math.exp(value / temperature) for value in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if (
            (not top_k or rank < top_k)
            and before <= top_p
            and probabilities[token] >= min_p * max(probabilities)
        ):
            kept[token] = probabilities[token]
        before += probabilities[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 3, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.3, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.8, 4, 0.8, 0.1),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 50, 1.0, 0.0),
    ],
)
def test_filters_keep_what_their_definition_keeps(temperature, top_k, top_p, min_p):
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(4))
    found = Sampler(temperature, top_k, top_p, min_p).probabilities(logits)
    found = found / found.sum(dim=-1, keepdim=True)
    for row in range(3):
        expected = filtered(logits[row].tolist(), temperature, top_k, top_p, min_p)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_dropped_token_is_never_drawn():
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 1.0]]).expand(2000, 5)
    tokens = Sampler(1.0, top_k=1_000, top_p=0.9).choose(logits, range(2000))
    assert set(tokens.tolist()) == {0}


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 2.0, 1.0]])
    assert Sampler().choose(logits, [0, 1]).tolist() == [1, 0]
    assert Sampler(1.0, top_k=1).choose(logits, [0, 1]).tolist() == [1, 0]


def test_uniform_numbers_are_uniform_and_independent_of_neighbours():
    drawn = np.array([[uniform(seed, position) for position in range(200)] for seed in range(100)])
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03
    assert uniform(-1, 5) != uniform(1, 5)


@pytest.fixture(scope="module")
def tree_and_logits():
    """A tree on random candidates and the target's logits at every node, a function of the node's path."""
    rng = np.random.default_rng(8)
    logprobs = np.sort(np.log(rng.dirichlet(np.ones(VOCABULARY), size=BLOCK - 1)))[:, ::-1].astype(np.float32)
    ids = np.stack([rng.permutation(VOCABULARY) for _ in range(BLOCK - 1)])
    tree = build_tree(0, ids, logprobs, 31)
    logits = torch.from_numpy(rng.normal(size=(tree.width, VOCABULARY))).float()
    return tree, logits


def first_two(tree, logits, draw):
    """Counts of the first token, and of the second one after each drafted first one.

    Trees are drawn a hundred at a time, each at positions of its own: every draw has its own randomness.
    """
    first, second, copies = np.zeros(VOCABULARY), {}, 100
    rows = logits.repeat(copies, 1)
    for start in range(0, DRAWS, copies):
        depths = np.tile(tree.depths, copies).reshape(copies, -1)
        positions = depths + (BLOCK * np.arange(start, start + copies))[:, None]
        for tokens in draw(rows, positions.ravel().tolist()).reshape(copies, -1):
            accepted = walk(tree, tokens)
            emitted = [int(tree.tokens[node]) for node in accepted.path[1:]] + [accepted.bonus]
            first[emitted[0]] += 1
            if len(emitted) > 1:
                second.setdefault(accepted.path[1], np.zeros(VOCABULARY))[emitted[1]] += 1
    return first, second


def worst_p_value(tree, logits, draw, sampler):
    """Smallest p-value over the first token and the second after each drafted one, Bonferroni-corrected."""
    expected = sampler.probabilities(logits)
    expected = (expected / expected.sum(-1, keepdim=True)).numpy()
    first, second = first_two(tree, logits, draw)
    values = [stats.chisquare(first, expected[0] * first.sum()).pvalue]
    values += [
        stats.chisquare(counts, expected[node] * counts.sum()).pvalue
        for node, counts in second.items()
        if counts.sum() > 500
    ]
    assert len(values) > 2
    return min(values) * len(values)


def test_tokens_through_a_tree_have_the_targets_distribution(tree_and_logits):
    tree, logits = tree_and_logits
    sampler = Sampler(0.9, seed=17)
    assert worst_p_value(tree, logits, sampler.choose, sampler) > 1e-3


def test_the_fit_fails_on_a_sampler_that_prefers_drafts(tree_and_logits):
    """The bias of accepting drafts a bit too often: one time in twenty the first child is taken unseen."""
    tree, logits = tree_and_logits
    sampler, eager = Sampler(0.9, seed=17), np.random.default_rng(3)
    children = [np.flatnonzero(tree.parents == node) for node in range(tree.width)]
    drafted = np.array([tree.tokens[kids[0]] if len(kids) else -1 for kids in children])

    def draw(rows, positions):
        tokens = sampler.choose(rows, positions)
        first_child = np.tile(drafted, len(tokens) // tree.width)
        return np.where((first_child >= 0) & (eager.random(len(tokens)) < 0.05), first_child, tokens)

    assert worst_p_value(tree, logits, draw, sampler) < 1e-3
