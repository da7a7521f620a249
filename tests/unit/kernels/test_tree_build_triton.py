"""The GPU builder against the numpy builders, node for node, ties and all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ddtree_engine.tree import (
    Builder,
    ancestor_mask,
    build_tree,
    links,
    parse_calibration,
    positions,
    sglang_encoding,
)
from ddtree_engine.tree.calibration import LOG_SIGMOID, LOG_SIGMOID_STEP
from ddtree_kernels.ancestry import ancestor_bits_naive
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_build.triton import CalibrationTables, tree_build

F, K = 16, 16


def tables(seed, batch=2, coarse=False, holes=False, block=F, topk=K):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(2.0, size=(batch, block - 1, topk)).astype(np.float32)
    if coarse:
        logprobs = np.round(logprobs)
    if holes:
        logprobs[rng.random(logprobs.shape) < 0.3] = -np.inf
    logprobs = -np.sort(-logprobs, axis=-1)
    ids = rng.permuted(np.tile(np.arange(1000), (batch * (block - 1), 1)), axis=1)[:, :topk]
    return ids.reshape(batch, block - 1, topk), logprobs


def fitted(seed=0):
    rng = np.random.default_rng(seed)

    def side():
        return {
            "depth": rng.normal(0, 1, F - 1).tolist(),
            "rank": rng.normal(-1, 1, K).tolist(),
            "slope": float(rng.uniform(0.2, 1)),
        }

    head = {"schema": 1, "kind": "ddtree-calibration", "block": F, "topk": K, "logprob_floor": -12.0}
    return parse_calibration(head | {"on": side(), "off": side()})


def device_tables(calibration):
    def pair(name):
        return torch.from_numpy(np.stack([getattr(calibration.on, name), getattr(calibration.off, name)]))

    return CalibrationTables(
        depth=pair("depth"),
        rank=pair("rank"),
        slope=torch.tensor([calibration.on.slope, calibration.off.slope], dtype=torch.float32),
        floor=torch.tensor([calibration.logprob_floor], dtype=torch.float32),
        value=torch.from_numpy(LOG_SIGMOID[:-1].copy()),
        step=torch.from_numpy(LOG_SIGMOID_STEP.copy()),
    )


def build_both(ids, logprobs, width, builder, calibration=None, budgets=None):
    batch = len(ids)
    found = tree_build(
        torch.arange(batch) + 5000,
        torch.from_numpy(ids),
        torch.from_numpy(logprobs),
        width,
        torch.arange(batch) * 7 + 3,
        builder=builder,
        calibration=None if calibration is None else device_tables(calibration),
        budgets=None if budgets is None else torch.tensor(budgets),
    )
    expected = [
        build_tree(
            5000 + n,
            ids[n],
            logprobs[n],
            width - 1 if budgets is None else min(budgets[n], width - 1),
            Builder(builder),
            calibration,
        )
        for n in range(batch)
    ]
    return found, expected


def check(found, expected, width):
    for n, tree in enumerate(expected):
        count = tree.width
        assert found.counts[n] == count
        for name in ("tokens", "parents", "depths", "ranks"):
            assert getattr(found, name)[n, :count].tolist() == getattr(tree, name).tolist(), name
        assert found.scores[n, :count].tolist() == tree.scores.tolist()
        assert found.positions[n, :count].tolist() == positions(tree, n * 7 + 3).tolist()
        encoding = sglang_encoding(tree, width)
        assert found.tokens[n].tolist() == encoding.tokens.tolist()
        assert found.selected_index[n].tolist() == encoding.selected_index.tolist()
        assert found.parent_list[n].tolist() == encoding.parent_list.tolist()
        if count == width:
            first_child, next_sibling = links(tree)
            assert found.first_child[n].tolist() == first_child.tolist()
            assert found.next_sibling[n].tolist() == next_sibling.tolist()
            assert ancestor_mask(tree).sum() == ancestor_mask_of(found, n).sum()
    assert torch.equal(found.bits, ancestor_bits_naive(found.parents))


def ancestor_mask_of(found, n):
    words = found.bits[n].to(torch.int64)
    return torch.stack([(words[:, j // 32] >> (j % 32)) & 1 for j in range(found.tokens.shape[1])], dim=1)


@pytest.mark.parametrize("builder", ["best-first", "spine-first", "calibrated"])
@pytest.mark.parametrize("width", [1, 8, 33])
def test_trees_equal_the_numpy_builders(builder, width):
    calibration = fitted() if builder == "calibrated" else None
    for options in ({}, {"coarse": True}, {"holes": True}):
        found, expected = build_both(*tables(width, batch=1, **options), width, builder, calibration)
        check(found, expected, width)


def test_the_widest_tree():
    found, expected = build_both(*tables(1, batch=1, coarse=True), 128, "spine-first")
    check(found, expected, 128)


@pytest.mark.parametrize("builder", ["best-first", "spine-first"])
def test_equal_scores_everywhere(builder):
    ids, logprobs = tables(2)
    found, expected = build_both(ids, np.zeros_like(logprobs), 32, builder)
    check(found, expected, 32)


@pytest.mark.parametrize(("block", "topk"), [(2, 3), (3, 1), (4, 5)])
@pytest.mark.parametrize("builder", ["best-first", "spine-first"])
def test_rows_without_a_candidate_become_children_of_the_root(builder, block, topk):
    found, expected = build_both(*tables(3, batch=1, block=block, topk=topk), 24, builder)
    assert all(tree.width < 24 for tree in expected) or topk == 5
    check(found, expected, 24)


@pytest.mark.parametrize("builder", ["best-first", "spine-first"])
def test_every_request_may_have_its_own_budget(builder):
    found, expected = build_both(*tables(4, batch=3), 32, builder, budgets=[0, 7, 90])
    check(found, expected, 32)


def test_nan_is_never_chosen():
    ids, logprobs = tables(5)
    broken = logprobs.copy()
    broken[:, 2, 3:], logprobs[:, 2, 3:] = np.nan, -np.inf
    found = tree_build(
        torch.zeros(2).long(), torch.from_numpy(ids), torch.from_numpy(broken), 16, torch.zeros(2).long()
    )
    same = tree_build(
        torch.zeros(2).long(), torch.from_numpy(ids), torch.from_numpy(logprobs), 16, torch.zeros(2).long()
    )
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


def test_wrong_arguments_are_named():
    ids, logprobs = (torch.from_numpy(x) for x in tables(6))
    one = torch.zeros(2).long()
    for arguments, message in (
        ((one, ids[0], logprobs, 8, one), "ids: found shape"),
        ((one, ids, logprobs[:1], 8, one), "logprobs: found shape"),
        ((one, ids, logprobs, 129, one), "width: found 129"),
        ((one[:1], ids, logprobs, 8, one), "roots: found shape"),
    ):
        with pytest.raises(KernelInputError, match=message):
            tree_build(*arguments)
    with pytest.raises(KernelInputError, match="calibration: allowed with"):
        tree_build(one, ids, logprobs, 8, one, builder="calibrated")
    with pytest.raises(KernelInputError, match="builder: found 'other'"):
        tree_build(one, ids, logprobs, 8, one, builder="other")
