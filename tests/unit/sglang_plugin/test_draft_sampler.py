import threading

import pytest
import torch
from ddtree_engine.sglang_plugin.draft_sampler import Head, TreeDraftSampler, candidates, ranked
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder
from ddtree_engine.tree.build import Builder

HIDDEN, VOCABULARY = 24, 200


@pytest.fixture
def weight():
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))


def test_log_probabilities_are_over_the_whole_vocabulary_and_ids_are_best_first(weight):
    hidden = torch.randn(6, HIDDEN)
    ids, logprobs = candidates(hidden, Head(weight, VOCABULARY, 0), 8)
    full = torch.log_softmax(hidden @ weight.T, -1)
    torch.testing.assert_close(logprobs, full.gather(1, ids))
    assert ids.tolist() == full.topk(8).indices.tolist()


def test_padding_rows_of_the_head_are_no_candidates(weight):
    padded = torch.cat([weight, torch.full((56, HIDDEN), 100.0)])
    hidden = torch.randn(6, HIDDEN).abs()
    ids, logprobs = candidates(hidden, Head(padded, VOCABULARY, 0), 8)
    expected = candidates(hidden, Head(weight, VOCABULARY, 0), 8)
    assert ids.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1])


def test_equal_logits_are_ranked_by_token_id_as_argmax_does():
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ids = torch.tensor([[7, 9, 4, 1]])
    assert [part.tolist() for part in ranked(values, ids, 3)] == [[[3.0, 3.0, 2.0]], [[4, 9, 1]]]


def test_a_vocabulary_smaller_than_topk_ends_in_no_candidates(weight):
    ids, logprobs = candidates(torch.randn(2, HIDDEN), Head(weight[:3], 3, 0), 8)
    assert torch.isneginf(logprobs[:, 3:]).all()
    assert torch.isfinite(logprobs[:, :3]).all()
    assert ids.shape == (2, 8)


class Ranks:
    """An all-gather between threads: real exchange, one process."""

    def __init__(self, count):
        self.world_size = count
        self.barrier = threading.Barrier(count)
        self.parts = {}
        self.local = threading.local()

    def all_gather_into_tensor(self, output, local):
        self.parts[self.local.rank] = local
        self.barrier.wait()
        output.copy_(torch.cat([self.parts[rank] for rank in range(self.world_size)]))
        self.barrier.wait()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_vocabulary_gives_every_rank_the_whole_ones_candidates(ranks, weight):
    hidden = torch.randn(5, HIDDEN)
    expected = candidates(hidden, Head(weight, VOCABULARY, 0), 8)
    group = Ranks(ranks)
    size = VOCABULARY // ranks
    results = {}

    def run(rank):
        group.local.rank = rank
        head = Head(weight[rank * size : (rank + 1) * size], size, rank * size, group)
        results[rank] = candidates(hidden, head, 8)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(ranks):
        assert results[rank][0].tolist() == expected[0].tolist()
        torch.testing.assert_close(results[rank][1], expected[1])


def test_the_sampler_keeps_chain_candidates_and_trees_of_its_batch(weight):
    block, requests = 6, 3
    builder = TreeBuilder(block, 4, 15, Builder.BEST_FIRST, None, "cpu")
    sampler = TreeDraftSampler(Head(weight, VOCABULARY, 0), builder, block, max_batch=8)
    hidden = torch.randn(requests * block, HIDDEN)
    input_ids = torch.full((requests, block), 199)
    input_ids[:, 0] = torch.tensor([5, 6, 7])
    sampler(hidden, input_ids.view(-1))
    drafted = (hidden.view(requests, block, -1)[:, 1:] @ weight.T).argmax(-1)
    assert sampler.out[: requests * (block - 1)].view(requests, -1).tolist() == drafted.tolist()
    trees = sampler.trees(requests)
    assert trees.tokens[:, 0].tolist() == [5, 6, 7]
    assert trees.parents[:, 0].tolist() == [-1] * requests
    # A smaller batch afterwards overwrites its own rows and leaves the buffers where they are.
    address = sampler.tree.tokens.data_ptr()
    sampler(hidden[:block], input_ids[2])
    assert sampler.trees(1).tokens[0, 0] == 7
    assert sampler.trees(1).tokens.data_ptr() == address
