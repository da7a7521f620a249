"""The start-up self-check sees a target that leaks, and passes one that does not."""

from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin import self_check
from ddtree_engine.sglang_plugin.errors import SelfCheckError
from harness import ROOTS, VOCABULARY

WIDTH = 16
ROWS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))


def logits_after(path):
    """Smooth logits of a path: depends on every token and on their order."""
    state = torch.zeros(VOCABULARY)
    for token in path:
        state = 0.7 * state + ROWS[token]
    return state


class Target:
    """A target in whose verify pass a fault can be planted.

    Its slot behaves as SGLang's recurrent kernels treat one: a prefill goes on from what the slot holds
    unless it was told to clear it, and a verify pass moves the convolution windows on to its last rows.
    """

    def __init__(self, runner, fault):
        self.model_runner, self.fault, self.slot = runner, fault, [1, 2, 3]
        runner.forward = self.prefill

    def prefill(self, forward_batch):
        assert not torch.is_grad_enabled()
        tokens = forward_batch.input_ids.tolist()
        assert forward_batch.positions.tolist() == list(range(len(tokens)))
        assert len(forward_batch.out_cache_loc) == len(tokens)
        cleared = forward_batch.mamba_clear_indices
        self.slot = tokens if cleared is not None and 1 in cleared else self.slot + tokens
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits_after(self.slot)[None]))

    def forward_batch_generation(self, batch, forward_batch, is_verify):
        tokens = forward_batch.input_ids.tolist()
        (parents,) = harness.parents_from_mask(forward_batch, WIDTH)
        rows = []
        for node in range(WIDTH):
            path, at = [], node
            while at >= 0:
                path.append(tokens[at])
                at = parents[at]
            if self.fault == "rows in order":
                path = tokens[node::-1]
            rows.append(logits_after(self.slot + path[::-1]))
        self.slot = self.slot + tokens[-3:]
        linear = self.model_runner.attn_backend.linear_attn_backend
        linear.forward_metadata.retrieve_parent_token = torch.tensor([parents])
        if self.fault == "kernel did not run":
            linear.forward_metadata.retrieve_parent_token = torch.zeros(1, WIDTH, dtype=torch.int64)
        if self.fault == "not a number":
            rows[1:] = [row * torch.nan for row in rows[1:]]
        output = SimpleNamespace(next_token_logits=torch.stack(rows))
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=True)


@pytest.fixture
def check(published, monkeypatch):
    harness.patch_sglang(monkeypatch)

    def run(fault):
        runner, recorded = harness.make_runner(monkeypatch, len(ROOTS))
        pool = runner.req_to_token_pool
        pool.req_index_to_mamba_index_mapping = torch.zeros(4, dtype=torch.int32)
        states = SimpleNamespace(temporal=torch.ones(2, 4, 3), conv=[torch.ones(2, 4, 3)])
        pool.mamba_pool = SimpleNamespace(mamba_cache=states)
        runner.attn_backend.linear_attn_backend = SimpleNamespace(forward_metadata=SimpleNamespace())
        logits = np.zeros((len(ROOTS), harness.BLOCK - 1, VOCABULARY), np.float32)
        worker = harness.make_worker(runner, recorded, logits, WIDTH)
        worker._target_worker = Target(runner, fault)
        with harness.configured(WIDTH):
            return self_check.run(worker, trees=3), pool

    return run


def test_a_sound_target_passes_and_its_seat_is_given_back(check):
    report, pool = check(None)
    assert (report["trees"], report["kernel_trees"], report["graph"]) == (3, 3, True)
    assert report["leaves"] == report["argmax_equal"] > 3
    assert report["max_relative_error"] < 1e-6
    assert report["max_sibling_change"] == 0
    said = {key: report[key] for key in ("node_path_max_diff", "relative_to_range", "sibling_leak_max_diff")}
    assert said == {
        "node_path_max_diff": report["max_error"],
        "relative_to_range": report["max_relative_error"],
        "sibling_leak_max_diff": 0,
    }
    assert (report["dtype"], report["passed"]) == ("float32", True)
    assert not pool.req_to_token[1].any()
    assert not pool.req_index_to_mamba_index_mapping.any()
    cache = pool.mamba_pool.mamba_cache
    assert not cache.temporal[:, 1].any()
    assert cache.temporal[:, 2].all()
    assert not cache.conv[0][:, 1].any()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rows in order", "another branch moved the logits"),
        ("kernel did not run", "kernels ran for 0 of 3"),
        ("not a number", "node and path differ by nan"),
    ],
)
def test_a_fault_stops_the_server_and_is_named(check, fault, said):
    with pytest.raises(SelfCheckError, match=said):
        check(fault)


def test_a_cache_without_memory_behind_it_is_left_alone(check, monkeypatch):
    make = harness.make_runner

    def unbacked(*arguments):
        runner, recorded = make(*arguments)
        runner.token_to_kv_pool = SimpleNamespace(post_capture_active=True)
        return runner, recorded

    monkeypatch.setattr(harness, "make_runner", unbacked)
    report, pool = check("rows in order")
    assert list(report) == ["skipped"]
    assert pool.req_to_token[1].any()


@pytest.mark.parametrize(
    ("quantization", "cache", "count"),
    [
        (None, torch.bfloat16, 2),
        (None, torch.float8_e4m3fn, 1),
        (None, torch.float8_e5m2, 1),
        ("fp8", torch.bfloat16, 1),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_numbers(quantization, cache, count):
    runner = SimpleNamespace(
        dtype=torch.bfloat16,
        kv_cache_dtype=cache,
        model_config=SimpleNamespace(quantization=quantization),
    )
    assert self_check._bytes(runner) == count
    assert count in self_check.TOLERANCE
