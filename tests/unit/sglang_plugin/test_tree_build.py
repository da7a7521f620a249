"""The device builder gives the trees of the CPU builder, node for node."""

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder, encode
from ddtree_engine.tree import layout
from ddtree_engine.tree.build import Builder, build_tree
from ddtree_engine.tree.calibration import parse_calibration


def sorted_table(rng, positions, topk, *, step=None):
    """Candidate log-probabilities best first; `step` rounds them so that many are equal."""
    logprobs = np.log(rng.dirichlet(np.full(topk * 3, 0.3), size=positions))[:, :topk]
    logprobs = np.maximum(logprobs, -30.0)
    if step:
        logprobs = np.round(logprobs / step) * step
    logprobs = -np.sort(-logprobs, axis=1).astype(np.float32)
    ids = np.stack([rng.permutation(topk * 50)[:topk] for _ in range(positions)])
    return ids, logprobs


def calibration(rng, block, topk):
    def side():
        return {
            "depth": rng.normal(0.5, 1.0, block - 1).tolist(),
            "rank": (-np.arange(topk) * 0.4 + rng.normal(0, 0.5, topk)).tolist(),
            "slope": 0.8,
        }

    return parse_calibration(
        {
            "schema": 1,
            "kind": "ddtree-calibration",
            "block": block,
            "topk": topk,
            "logprob_floor": -12.0,
            "on": side(),
            "off": side(),
        }
    )


def assert_same(batch, row, tree, root):
    width = tree.width
    for name in ("tokens", "parents", "depths", "ranks"):
        np.testing.assert_array_equal(getattr(batch, name)[row, :width].numpy(), getattr(tree, name), name)
    np.testing.assert_array_equal(batch.scores[row, :width].double().numpy(), tree.scores)
    # What does not fit into the table fills up with further children of the root.
    assert batch.parents[row, width:].eq(0).all()
    assert batch.tokens[row, width:].eq(root).all()
    assert batch.depths[row, width:].eq(1).all()


@pytest.mark.parametrize("builder", list(Builder))
@pytest.mark.parametrize("budget", [1, 7, 15, 31, 63])
@pytest.mark.parametrize("step", [None, 0.5, 2.0])
def test_a_tree_that_differs_from_the_cpu_builders(builder, budget, step):
    rng = np.random.default_rng(budget * 7 + int((step or 0) * 2))
    block, topk, requests = 8, 5, 6
    fitted = calibration(rng, block, topk) if builder is Builder.CALIBRATED else None
    tables = [sorted_table(rng, block - 1, topk, step=step) for _ in range(requests)]
    roots = rng.integers(0, 1000, requests)
    build = TreeBuilder(block, topk, budget, builder, fitted, "cpu")
    batch = build(
        torch.from_numpy(roots),
        torch.from_numpy(np.stack([ids for ids, _ in tables])),
        torch.from_numpy(np.stack([logprobs for _, logprobs in tables])),
    )
    for row, (ids, logprobs) in enumerate(tables):
        tree = build_tree(int(roots[row]), ids, logprobs, budget, builder, fitted)
        assert_same(batch, row, tree, roots[row])


@pytest.mark.parametrize("builder", [Builder.BEST_FIRST, Builder.SPINE_FIRST])
def test_candidates_that_do_not_exist_are_never_taken(builder):
    rng = np.random.default_rng(3)
    ids, logprobs = sorted_table(rng, 3, 4)
    logprobs[:, 2:] = -np.inf
    logprobs[1, 1:] = -np.inf
    tree = build_tree(9, ids, logprobs, 63, builder)
    batch = TreeBuilder(4, 4, 63, builder, None, "cpu")(
        torch.tensor([9]), torch.from_numpy(ids)[None], torch.from_numpy(logprobs)[None]
    )
    assert tree.width < 64
    assert_same(batch, 0, tree, 9)


def test_certain_tokens_tie_with_their_parents_and_keep_their_order():
    ids = np.arange(12).reshape(4, 3)
    logprobs = np.array([[0.0, -1.0, -1.0], [0.0, 0.0, -1.0], [0.0, -1.0, -1.0], [0.0, 0.0, 0.0]], np.float32)
    tree = build_tree(99, ids, logprobs, 31)
    batch = TreeBuilder(5, 3, 31, Builder.BEST_FIRST, None, "cpu")(
        torch.tensor([99]), torch.from_numpy(ids)[None], torch.from_numpy(logprobs)[None]
    )
    assert_same(batch, 0, tree, 99)


def test_a_single_candidate_a_position_gives_dflashs_chain():
    rng = np.random.default_rng(0)
    ids, logprobs = sorted_table(rng, 7, 1)
    batch = TreeBuilder(8, 1, 7, Builder.BEST_FIRST, None, "cpu")(
        torch.tensor([5]), torch.from_numpy(ids)[None], torch.from_numpy(logprobs)[None]
    )
    assert batch.tokens[0].tolist() == [5, *ids[:, 0].tolist()]
    assert batch.parents[0].tolist() == list(range(-1, 7))


def test_the_encoding_is_the_layout_modules():
    rng = np.random.default_rng(1)
    ids, logprobs = sorted_table(rng, 7, 6)
    tree = build_tree(1, ids, logprobs, 31)
    expected = layout.sglang_encoding(tree, 32)
    parent_list, selected = encode(torch.from_numpy(tree.parents)[None])
    assert parent_list[0].tolist() == expected.parent_list.tolist()
    assert selected[0].tolist() == expected.selected_index.tolist()
