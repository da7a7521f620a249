"""The tree build kernel, as the plugin calls it, gives the torch builder's trees (in the interpreter)."""

import json

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin.tree_build import KernelTreeBuilder, TreeBuilder
from ddtree_engine.tree.build import Builder
from ddtree_engine.tree.calibration import parse_calibration

BLOCK, TOPK, REQUESTS = 8, 5, 3


def fitted(rng):
    def side():
        return {
            "depth": rng.normal(0.5, 1.0, BLOCK - 1).tolist(),
            "rank": rng.normal(-0.5, 0.5, TOPK).tolist(),
            "slope": 0.8,
        }

    text = {"schema": 1, "kind": "ddtree-calibration", "block": BLOCK, "topk": TOPK, "logprob_floor": -12.0}
    return parse_calibration(json.loads(json.dumps({**text, "on": side(), "off": side()})))


@pytest.mark.parametrize("builder", list(Builder))
@pytest.mark.parametrize("budget", [7, 31])
@pytest.mark.parametrize("step", [None, 1.0])
def test_both_builders_grow_the_same_tree(builder, budget, step):
    rng = np.random.default_rng(budget)
    calibration = fitted(rng) if builder is Builder.CALIBRATED else None
    logprobs = np.log(rng.dirichlet(np.full(TOPK * 3, 0.3), size=(REQUESTS, BLOCK - 1)))[..., :TOPK]
    logprobs = np.maximum(logprobs, -30.0)
    if step:
        logprobs = np.round(logprobs / step) * step
    logprobs = torch.from_numpy(-np.sort(-logprobs, axis=-1).astype(np.float32))
    ids = torch.from_numpy(
        rng.permuted(np.tile(np.arange(50), (REQUESTS, BLOCK - 1, 1)), axis=-1)[..., :TOPK].copy()
    )
    roots = torch.tensor([70, 71, 72])
    arguments = (BLOCK, TOPK, budget, builder, calibration, "cpu")
    plain = TreeBuilder(*arguments)(roots, ids, logprobs)
    kernel = KernelTreeBuilder(*arguments)(roots, ids, logprobs)
    for name in ("tokens", "parents", "depths", "ranks"):
        assert torch.equal(getattr(plain, name), getattr(kernel, name)), name
    assert torch.equal(plain.scores, kernel.scores)


def test_an_exhausted_table_fills_up_alike():
    ids = torch.arange(12).view(1, 4, 3)
    logprobs = torch.log(torch.tensor([0.5, 0.3, 0.2])).repeat(1, 4, 1)
    logprobs[:, 1:, 1:] = -torch.inf
    arguments = (5, 3, 31, Builder.BEST_FIRST, None, "cpu")
    plain = TreeBuilder(*arguments)(torch.tensor([99]), ids, logprobs)
    kernel = KernelTreeBuilder(*arguments)(torch.tensor([99]), ids, logprobs)
    assert torch.isneginf(plain.scores).any()
    for name in ("tokens", "parents", "depths", "ranks", "scores"):
        assert torch.equal(getattr(plain, name), getattr(kernel, name)), name
