"""Several verify widths in one server: a step at any of them is that of a server of this width alone."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import recurrent
import torch
from ddtree_engine.sglang_plugin import hooks
from ddtree_engine.sglang_plugin.chooser import WidthChooser
from ddtree_engine.sglang_plugin.config import load_config, parse_config
from ddtree_engine.sglang_plugin.errors import ArgumentError
from ddtree_engine.sglang_plugin.metrics import StageTimes
from ddtree_engine.sglang_plugin.widths import Captured, Widths
from ddtree_engine.sglang_plugin.wy import hooks as wy
from ddtree_engine.tree.build import Builder
from ddtree_kernels import interpreting
from harness import PREFIXES, ROOTS, TOPK
from recurrent import LAYER_IDS, RUNNING

STATES = ("snapshot", "wy")


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    interpreting.prepare()


@pytest.fixture
def make_side(published, configure, monkeypatch):
    """A server's recurrent part with real pools, for a state, a width and, perhaps, several widths."""
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as delta
    from sglang.kernels.ops.mamba import causal_conv1d_triton as conv
    from sglang.srt.runtime_context import get_exec, get_spec

    for module in (delta, conv):
        monkeypatch.setattr(module, "is_arch_support_pdl", lambda: False)
    configure(state="wy")
    hooks.install()

    def side(state, width, widths=None):
        configure(state=state, **({} if widths is None else {"widths": widths}))
        return recurrent.make_side(monkeypatch, width, recurrent.cache_params())

    with get_exec().mamba.override(mamba_track_interval=64), get_spec().override(speculative_eagle_topk=2):
        yield side


class Graphs:
    """Stands in for SGLang's graph runner: keeps what it would have been captured with."""

    def __init__(self, runner, *, attn_backend=None, speculative_num_draft_tokens=None):
        from sglang.srt.runtime_context import get_spec

        self.backend, self.width = attn_backend, speculative_num_draft_tokens
        self.spec_width = get_spec().speculative_num_draft_tokens
        part = wy.recurrent_of(runner)
        self.stash = None if part is None else part.stash


def captured(side, widths):
    """The side's runner with every width built, by the plugin's own code."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    runner = side.target_worker.model_runner

    def build(init_new_workspace):
        assert init_new_workspace
        backend = hybrid.HybridLinearAttnBackend.__new__(hybrid.HybridLinearAttnBackend)
        backend.linear_attn_backend = GDNAttnBackend(runner)
        return backend

    runner._get_attention_backend = build
    runner.init_new_workspace, runner.eager_runner = False, object()
    runner.decode_cuda_graph_runner = Graphs(runner)
    bound = []
    runner.kv_index_translator = SimpleNamespace(bind_and_verify_backends=bound.extend)
    prepared = []
    worker = SimpleNamespace(
        model_runner=runner,
        verify_width=widths[-1],
        speculative_num_draft_tokens=widths[-1],
        times=StageTimes(enabled=False),
        prepare_recurrent_layers=lambda: prepared.append(runner.attn_backend),
    )
    several = Widths(worker, tuple(widths), worker.times)
    several.capture()
    assert bound == prepared == [one.backend for one in several._captured.values()]
    return several


def state_of(several):
    from sglang.srt.runtime_context import get_spec

    worker, runner = several.worker, several.worker.model_runner
    recurrent_part = wy.recurrent_of(runner)
    return (
        worker.verify_width,
        worker.speculative_num_draft_tokens,
        worker.times,
        runner.attn_backend,
        runner.decode_cuda_graph_runner,
        runner.req_to_token_pool.mamba_pool.mamba_cache,
        None if recurrent_part is None else recurrent_part.stash,
        get_spec().speculative_num_draft_tokens,
    )


def assert_same(now, before):
    assert all(mine is theirs or mine == theirs for mine, theirs in zip(now, before, strict=True))


def pools(side):
    cache = side.pool.mamba_pool.mamba_cache
    return cache.temporal, cache.conv[0]


def one_step(side, one, counts, padded=None):
    outputs = recurrent.run_verify(side, one, padded)
    index, lens = recurrent.accepted(one, counts)
    recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10]))
    return outputs


@pytest.mark.parametrize("state", STATES)
def test_steps_of_changing_widths_are_those_of_servers_of_one_width(state, make_side):
    alone = {width: make_side(state, width) for width in (4, 6)}
    several_side = make_side(state, 6, widths=[4, 6])
    several = captured(several_side, [4, 6])
    before = state_of(several)
    for side in (several_side, *alone.values()):
        side.pool.req_index_to_mamba_index_mapping[1:3] = torch.tensor([4, 7], dtype=torch.int32)
    moved = pools(several_side)[0].clone()
    for step, width in enumerate((6, 4, 6, 4)):
        one = recurrent.make_pass(width, [2, 1], [62, 20], seed=step)
        for mine, theirs in zip(pools(several_side), pools(alone[width]), strict=True):
            theirs.copy_(mine)
        expected = one_step(alone[width], one, [3, 2])
        with several.at(width):
            backend = several.worker.model_runner.attn_backend.linear_attn_backend
            found = one_step(dataclasses.replace(several_side, backend=backend), one, [3, 2])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(pools(several_side), pools(alone[width]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        assert not torch.equal(moved, pools(several_side)[0])
        moved = pools(several_side)[0].clone()
        assert_same(state_of(several), before)


@pytest.mark.parametrize("state", STATES)
def test_narrow_graphs_are_captured_on_their_own_width_and_the_same_memory(state, make_side):
    side = make_side(state, 6, widths=[2, 4, 6])
    several = captured(side, [2, 4, 6])
    widest = side.target_worker.model_runner.decode_cuda_graph_runner
    for width in (2, 4):
        graphs = several._captured[width].graphs
        assert (graphs.width, graphs.spec_width) == (width, width)
        assert graphs.backend is several._captured[width].backend
        if state == "snapshot":
            assert graphs.stash is None
            continue
        assert graphs.stash.x.shape[:3] == (len(LAYER_IDS), RUNNING + 1, width)
        for name in ("x", "a", "b"):
            assert getattr(graphs.stash, name).data_ptr() == getattr(widest.stash, name).data_ptr()


def test_without_graphs_narrow_widths_run_as_the_widest_does(make_side):
    side = make_side("wy", 6, widths=[4, 6])
    runner = side.target_worker.model_runner
    several = captured(side, [4, 6])
    for none in (None, runner.eager_runner):
        runner.decode_cuda_graph_runner = none
        several.capture()
        assert several._captured[4].graphs is none


def test_sglangs_graph_runner_and_backends_are_made_as_the_plugin_makes_them():
    import inspect

    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    inspect.signature(DecodeCudaGraphRunner).bind(None, attn_backend=None, speculative_num_draft_tokens=4)
    inspect.signature(ModelRunner._get_attention_backend).bind(None, init_new_workspace=True)
    inspect.signature(KVIndexTranslator.bind_and_verify_backends).bind(None, [])


def test_a_step_that_fails_leaves_the_widest(make_side):
    side = make_side("wy", 6, widths=[4, 6])
    several = captured(side, [4, 6])
    before = state_of(several)

    def fail():
        with several.at(4):
            assert several.worker.verify_width == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_same(state_of(several), before)


def test_the_planned_bytes_are_those_that_the_pool_holds(make_side):
    side = make_side("wy", 64, widths=[16, 64])
    part = side.pool.mamba_pool.ddtree
    stashes = [part.stash, part.narrower[16]]
    held = {}
    for stash in stashes:
        for field in dataclasses.fields(stash):
            found = getattr(stash, field.name)
            for tensor in found if field.name == "scratch" else [found]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
    assert part.bytes == sum(held.values()) == wy.scratch_bytes(side.target_worker.model_runner)
    assert part.bytes == part.stash.layout.total_bytes + part.narrower[16].layout.shared_bytes
    assert side.pool.mamba_pool.mem_usage * 2**30 == pytest.approx(
        part.bytes + sum(tensor.numel() * 4 for tensor in pools(side))
    )


# -- a whole step of the worker ---------------------------------------------------------------------------


@pytest.fixture
def step(published, monkeypatch):
    """One step of a worker of several widths, its requests asking for budgets, or of a worker of one."""
    harness.patch_sglang(monkeypatch)

    def run(width, widths=None, asked=(None, None, None), seed=0, config="{}"):
        rng = np.random.default_rng(seed)
        logits = np.stack([harness.candidate_logits(rng, root) for root in ROOTS])
        runner, recorded = harness.make_runner(monkeypatch, len(ROOTS))
        widest = widths[-1] if widths else width
        worker = harness.make_worker(runner, recorded, logits, widest, Builder.BEST_FIRST, TOPK)
        batch = harness.make_batch(runner, widest)
        for request, budget in zip(batch.reqs, asked, strict=True):
            custom = None if budget is None else {"ddtree_budget": budget}
            request.sampling_params.custom_params = custom
        if widths:
            worker.config = parse_config(json.dumps({"widths": widths, "topk": TOPK, **json.loads(config)}))
            worker.widths = Widths(worker, tuple(widths), worker.times)
            for narrower in widths[:-1]:
                worker.widths._captured[narrower] = Captured(runner.attn_backend, None, None)
            worker.chooser = WidthChooser(worker.config)
        with harness.configured(widest):
            result = worker.forward_batch_generation(batch, on_publish=recorded.published.append)
        return SimpleNamespace(result=result, worker=worker, batch=batch, **vars(recorded))

    return run


SEVERAL = [4, 8, 16]


def same_tensors(ours, theirs):
    """Recorded calls, each a tuple or a dict, with equal tensors."""

    def plain(call):
        values = call.values() if isinstance(call, dict) else call
        return [value.tolist() for value in values if isinstance(value, torch.Tensor)]

    assert [plain(call) for call in ours] == [plain(call) for call in theirs]


@pytest.mark.parametrize("width", SEVERAL)
def test_a_forced_width_does_what_a_server_of_this_width_does(width, step):
    for seed in range(2):
        alone = step(width, seed=seed)
        forced = step(width, SEVERAL, (None, width - 1, 3), seed=seed)
        assert forced.worker.verify_width == 16
        assert forced.result.speculative_num_draft_tokens == width
        assert forced.result.accept_lens.tolist() == alone.result.accept_lens.tolist()
        assert forced.result.next_token_ids.tolist() == alone.result.next_token_ids.tolist()
        assert forced.result.accept_index.tolist() == alone.result.accept_index.tolist()
        assert forced.published[0].tolist() == alone.published[0].tolist()
        same_tensors(forced.moved, alone.moved)
        same_tensors(forced.injected, alone.injected)
        same_tensors(forced.committed, alone.committed)
        seen = forced.worker._target_worker.seen
        assert seen.input_ids.view(len(PREFIXES), -1).shape[1] == width


def test_the_largest_width_that_is_asked_for_serves_the_batch_and_else_the_default(step):
    assert step(16, SEVERAL, (3, None, 7)).result.speculative_num_draft_tokens == 8
    assert step(16, SEVERAL).result.speculative_num_draft_tokens == 16
    default = step(16, SEVERAL, config='{"budget": 7}')
    assert default.result.speculative_num_draft_tokens == 8
    assert default.worker.chooser.steps == {4: 0, 8: 1, 16: 0}


def test_a_step_tells_what_every_narrower_width_would_have_accepted(step):
    for seed in range(3):
        wide = step(16, SEVERAL, seed=seed)
        label, tensors = wide.worker.chooser._tap.take()
        assert label == {"width": 16}
        alone = [step(width, seed=seed).result.accept_lens.tolist() for width in SEVERAL]
        assert tensors["lengths"].T.tolist() == alone


# -- start-up ---------------------------------------------------------------------------------------------


def test_the_server_is_made_for_the_widest(resolved, configure):
    configure(widths=[16, 32, 64])
    assert resolved().speculative_num_draft_tokens == 64
    assert resolved("--speculative-num-draft-tokens", "64").speculative_num_draft_tokens == 64
    with pytest.raises(ArgumentError, match="found 32, allowed is 64, the largest of"):
        resolved("--speculative-num-draft-tokens", "32")


def test_requests_name_a_captured_budget_or_get_a_400(plugin, configure):
    from sglang.srt.sampling.sampling_params import SamplingParams

    def refused(**custom):
        request = SimpleNamespace(sampling_params=SamplingParams(custom_params=custom))
        return hooks.refuse_request(lambda *_: None, request, True)

    configure(widths=[16, 32, 64])
    assert load_config().budgets == (15, 31, 63)
    assert refused(ddtree_budget=31) is None
    assert "found 7, allowed are 15, 31, 63" in refused(ddtree_budget=7)
    assert "found 'auto', allowed are 15, 31, 63:" in refused(ddtree_budget="auto")
    configure()
    assert "fixed at start (--speculative-num-draft-tokens)" in refused(ddtree_budget=31)
    configure(widths=[16, 32])
    assert "fixed at start (SGLANG_DDTREE_CONFIG)" in refused(ddtree_builder="spine-first")
