"""State option `wy` inside SGLang's own pools, backend and commit, beside the snapshots that it replaces."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import harness
import pytest
import recurrent
import torch
from ddtree_engine.sglang_plugin import hooks, memory, self_check
from ddtree_engine.sglang_plugin.errors import ArgumentError, SelfCheckError
from ddtree_engine.sglang_plugin.wy import hooks as wy
from ddtree_engine.sglang_plugin.wy import self_check as wy_self_check
from ddtree_engine.sglang_plugin.wy import verify
from ddtree_engine.tree.build import Builder
from ddtree_kernels import interpreting
from ddtree_kernels.commit.naive import commit_naive
from recurrent import CHANNELS, DEPTH, HV, LAYER_IDS, RUNNING, SLOTS
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 6
STATES = ("snapshot", "wy")
# Where SGLang's snapshots go, before and after which lengths: `mamba_track_grid` is a multiple of this.
GRID = 64


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    interpreting.prepare()


@pytest.fixture
def make(published, configure, monkeypatch):
    """A server's recurrent part: `make("wy")` or `make("snapshot")`, with equal states and weights."""
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as delta
    from sglang.kernels.ops.mamba import causal_conv1d_triton as conv
    from sglang.srt.runtime_context import get_exec

    for module in (delta, conv):
        monkeypatch.setattr(module, "is_arch_support_pdl", lambda: False)
    configure(state="wy")
    hooks.install()

    def side(state, width=WIDTH, **dtypes):
        configure(state=state)
        return recurrent.make_side(monkeypatch, width, recurrent.cache_params(**dtypes))

    with get_exec().mamba.override(mamba_track_interval=GRID):
        yield side


@pytest.fixture
def both(make):
    return lambda width=WIDTH, **dtypes: {state: make(state, width, **dtypes) for state in STATES}


def seat(sides, slots):
    """Give requests 1, 2, ... these slots of the pools."""
    for side in sides.values():
        side.pool.req_index_to_mamba_index_mapping[1 : len(slots) + 1] = torch.tensor(
            slots, dtype=torch.int32
        )


def pools(side):
    cache = side.pool.mamba_pool.mamba_cache
    return cache.temporal, cache.conv[0]


def assert_equal_pools(sides, state_tolerance=1e-5):
    (state, window), (wy_state, wy_window) = (pools(sides[name]) for name in STATES)
    torch.testing.assert_close(wy_state, state, rtol=1e-4, atol=state_tolerance)
    assert torch.equal(wy_window, window)


class NothingReachesTheHost(TorchDispatchMode):
    """Fails on what makes the host wait for the card, or has a shape that only the card knows."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert function.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "masked_select"}
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(("width", "requests"), [(WIDTH, [2, 1]), (33, [2])])
def test_a_verify_pass_gives_what_stored_states_give_and_leaves_the_pools_alone(width, requests, both):
    sides = both(width)
    seat(sides, [4, 7])
    one = recurrent.make_pass(width, requests, [10] * len(requests), seed=width)
    before = [pool.clone() for pool in pools(sides["wy"])]
    outputs = {name: recurrent.run_verify(side, one) for name, side in sides.items()}
    assert (
        outputs["wy"].shape == outputs["snapshot"].shape == (len(LAYER_IDS), 1, len(requests) * width, HV, 16)
    )
    torch.testing.assert_close(outputs["wy"], outputs["snapshot"], rtol=1e-3, atol=5e-5)
    assert all(torch.equal(pool, old) for pool, old in zip(pools(sides["wy"]), before, strict=True))
    seen = sides["wy"].pool.mamba_pool.ddtree.stash.parents_seen(len(requests))
    assert seen[:, 1:].tolist() == one.parents[:, 1:].tolist()
    assert seen[:, 0].tolist() == [-1] * len(requests)


@pytest.mark.parametrize(
    ("counts", "slots"),
    [([1], [4, 7, 2]), ([2, 4], [11, 4, 1]), ([DEPTH], [1, 2, 3])],
    ids=["root", "some", "all"],
)
def test_a_commit_leaves_what_the_last_accepted_nodes_snapshot_holds(counts, slots, both):
    sides = both()
    seat(sides, slots)
    requests = [3, 1][: len(counts)]
    one = recurrent.make_pass(WIDTH, requests, [10, 63][: len(counts)], seed=sum(counts))
    index, lens = recurrent.accepted(one, counts)
    old = pools(sides["wy"])[0].clone()
    for side in sides.values():
        recurrent.run_verify(side, one)
        recurrent.run_commit(side, one, index, lens)
    assert_equal_pools(sides)
    changed = (pools(sides["wy"])[0] != old).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert changed == sorted(slots[request - 1] for request in requests)


def test_a_snapshot_is_taken_where_the_length_passes_the_grid_and_only_there(both):
    """Requests at 62, 127 and 20 tokens: after the second and the first accepted node, and never."""
    sides = both()
    seat(sides, [4, 7, 2])
    one = recurrent.make_pass(WIDTH, [1, 2, 3], [62, 127, 20], seed=7)
    index, lens = recurrent.accepted(one, [3, 4, 4])
    assert lens.tolist()[:2] == [3, 4]
    old = [pool.clone() for pool in pools(sides["wy"])]
    for side in sides.values():
        recurrent.run_verify(side, one)
        recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10, 11]))
    assert_equal_pools(sides)
    for pool, was in zip(pools(sides["wy"]), old, strict=True):
        assert not torch.equal(pool[:, 9], was[:, 9])
        assert not torch.equal(pool[:, 9], pool[:, 4])
        assert not torch.equal(pool[:, 10], was[:, 10])
        assert torch.equal(pool[:, 11], was[:, 11])


def test_a_length_that_lands_on_the_grid_is_snapshot_and_one_that_starts_there_is_not(both):
    sides = both()
    seat(sides, [4, 7])
    one = recurrent.make_pass(WIDTH, [1, 2], [GRID - 2, GRID], seed=8)
    index, lens = recurrent.accepted(one, [2, 2])
    assert lens.tolist() == [2, 2]
    old = pools(sides["wy"])[0].clone()
    for side in sides.values():
        recurrent.run_verify(side, one)
        recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10]))
    assert_equal_pools(sides)
    state, _ = pools(sides["wy"])
    assert torch.equal(state[:, 9], state[:, 4])
    assert torch.equal(state[:, 10], old[:, 10])


def test_a_graphs_padded_rows_read_and_write_nothing(both):
    sides = both()
    seat(sides, [4, 7, 2])
    one = recurrent.make_pass(WIDTH, [3, 2], [10, 63], seed=9, padded=3)
    index, lens = recurrent.accepted(one, [2, 3])
    outputs = {}
    for name, side in sides.items():
        outputs[name] = recurrent.run_verify(side, one, padded=3)[:, :, : 2 * WIDTH]
        # With overlap the scheduler may give a finished request's row away before the commit.
        seat({name: side}, [5, 6, 8])
        recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10]))
    torch.testing.assert_close(outputs["wy"], outputs["snapshot"], rtol=1e-3, atol=5e-5)
    assert_equal_pools(sides)
    assert sides["wy"].backend.forward_metadata.mamba_cache_indices.tolist() == [2, 7, -1]


def test_steps_of_changing_batches_do_not_mix_their_stashes(both):
    sides = both()
    seat(sides, [4, 7, 2])
    for step, requests in enumerate([[1, 2, 3], [3]]):
        one = recurrent.make_pass(WIDTH, requests, [60 + step] * len(requests), seed=20 + step)
        index, lens = recurrent.accepted(one, [1 + (step + row) % 4 for row in range(len(requests))])
        track = torch.tensor([8 + request for request in requests])
        for side in sides.values():
            recurrent.run_verify(side, one, padded=3 if step % 2 else None)
            recurrent.run_commit(side, one, index, lens, track)
        assert_equal_pools(sides, state_tolerance=1e-4)


def test_a_chain_is_a_tree_like_any_other(both, monkeypatch):
    """One candidate a position: `dflash` on these kernels."""
    monkeypatch.setattr(
        recurrent,
        "random_tree",
        lambda rng, width, depth: (torch.arange(-1, width - 1).numpy(), torch.arange(width).numpy()),
    )
    sides = both(DEPTH)
    seat(sides, [4, 7])
    one = recurrent.make_pass(DEPTH, [1, 2], [10, 11])
    index, lens = recurrent.accepted(one, [2, DEPTH])
    assert lens.tolist() == [2, DEPTH]
    outputs = {}
    for name, side in sides.items():
        outputs[name] = recurrent.run_verify(side, one)
        recurrent.run_commit(side, one, index, lens)
    torch.testing.assert_close(outputs["wy"], outputs["snapshot"], rtol=1e-3, atol=5e-5)
    assert_equal_pools(sides)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_activations_stay_within_their_rounding(state_dtype, make):
    """Against snapshots in float32: SGLang's kernels do not run in 16 bits in the interpreter."""
    sides = {"snapshot": make("snapshot"), "wy": make("wy", dtype=torch.bfloat16, state_dtype=state_dtype)}
    seat(sides, [4, 7])
    for pool, half in zip(pools(sides["snapshot"]), pools(sides["wy"]), strict=True):
        pool.copy_(half)
    for layer, half in zip(sides["snapshot"].layers, sides["wy"].layers, strict=True):
        layer.conv_weights = half.conv_weights.float()
    one = recurrent.make_pass(WIDTH, [1, 2], [10, 63], dtype=torch.bfloat16, seed=3)
    wide = dataclasses.replace(one, inputs=[[tensor.float() for tensor in layer] for layer in one.inputs])
    index, lens = recurrent.accepted(one, [3, 4])
    outputs = {}
    for name, side in sides.items():
        outputs[name] = recurrent.run_verify(side, wide if name == "snapshot" else one).float()
        recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10]))
    assert sides["wy"].pool.mamba_pool.ddtree.stash.x.dtype == torch.bfloat16
    torch.testing.assert_close(outputs["wy"], outputs["snapshot"], rtol=2e-2, atol=2e-2)
    (state, window), (wy_state, wy_window) = (pools(sides[name]) for name in STATES)
    torch.testing.assert_close(wy_state.float(), state, rtol=2e-2, atol=5e-2)
    assert torch.equal(wy_window.float(), window)


def test_verify_and_commit_ask_the_host_for_nothing(make):
    side = make("wy")
    seat({"wy": side}, [4, 7])
    one = recurrent.make_pass(WIDTH, [1, 2], [10, 63])
    index, lens = recurrent.accepted(one, [2, 3])
    recurrent.run_verify(side, one)
    slots = side.backend.forward_metadata.mamba_cache_indices
    stash = side.pool.mamba_pool.ddtree.stash
    addresses = [stash.x.data_ptr(), stash.bits.data_ptr(), stash.scratch.responses.data_ptr()]
    with NothingReachesTheHost():
        stash.set_trees(one.parents)
        for place, (layer, (x, a, b)) in enumerate(zip(side.layers, one.inputs, strict=True)):
            cache = side.pool.mamba2_layer_cache(layer.layer_id)
            verify.verify_layer(
                stash, place, wy._weights(layer), x, a, b, cache.conv[0], cache.temporal, slots
            )
        recurrent.run_commit(side, one, index, lens, torch.tensor([9, 10]))
    assert addresses == [stash.x.data_ptr(), stash.bits.data_ptr(), stash.scratch.responses.data_ptr()]


def test_the_pool_holds_a_stash_of_the_planned_bytes_and_no_snapshot(make, caplog):
    with caplog.at_level(logging.INFO):
        side = make("wy", 16, dtype=torch.bfloat16)
    assert "state wy: stash of 4 rows x 16 nodes" in caplog.text
    pool = side.pool.mamba_pool
    assert pool.mamba_cache.intermediate_ssm is None
    assert pool.mamba_cache.intermediate_conv_window is None
    stash = pool.ddtree.stash
    assert stash.bytes == stash.layout.total_bytes
    shape = memory.RecurrentShape(
        layers=len(LAYER_IDS), value_heads=HV, value_dim=16, key_dim=16, conv_channels=CHANNELS,
        conv_taps=4, state_bytes=4, conv_bytes=2,
    )  # fmt: skip
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (stash.x, stash.a, stash.b))
    assert kept == memory.scratch_bytes(shape.stash_bytes, 16, RUNNING) == 4 * 16 * stash.layout.node_bytes
    states = pool.mamba_cache.temporal, pool.mamba_cache.conv[0]
    held = sum(tensor.numel() * tensor.element_size() for tensor in states)
    assert pool.mem_usage * 2**30 == pytest.approx(held + stash.bytes)
    assert wy.scratch_bytes(side.target_worker.model_runner) == stash.bytes


def test_with_snapshots_the_scratch_is_theirs(make):
    side = make("snapshot")
    cache = side.pool.mamba_pool.mamba_cache
    found = wy.scratch_bytes(side.target_worker.model_runner)
    assert found == 4 * sum(
        tensor.numel() for tensor in (cache.intermediate_ssm, *cache.intermediate_conv_window)
    )
    assert wy.recurrent_of(side.target_worker.model_runner) is None


@pytest.mark.parametrize("radix", [True, False])
def test_sglangs_budget_has_the_stash_in_it_and_no_states_for_nodes(make, monkeypatch, radix):
    """What is left for the KV cache and how many states: as without speculation, less the stash."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_memory, get_schedule

    make("wy")
    params = recurrent.cache_params()
    monkeypatch.setattr(KVCacheConfigurator, "fused_entry_bytes", lambda self, kind: None)
    configurator = KVCacheConfigurator.__new__(KVCacheConfigurator)
    configurator.mambaish_config = SimpleNamespace(mamba2_cache_params=params)
    configurator.model_config = SimpleNamespace(num_hidden_layers=4)
    configurator.pp_size = configurator.attn_dp_size = 1
    configurator.extra_mamba_cache_bytes_per_req = 0
    configurator.hybrid_gdn_config = configurator.hybrid_kda_config = None

    def budget(speculative, total):
        configurator.spec_algorithm = SimpleNamespace(is_none=lambda: not speculative)
        with (
            get_memory().override(disable_radix_cache=not radix),
            get_schedule().override(max_running_requests=RUNNING, max_mamba_cache_size=None),
        ):
            left = configurator._handle_max_mamba_cache(total)
            slots = get_schedule().max_mamba_cache_size
        return left, slots

    layout = wy._layout(params, layers=len(LAYER_IDS), running=RUNNING, width=64)
    total = 0.25
    assert budget(True, total) == budget(False, total - layout.total_bytes / 2**30)


def test_changed_weights_reach_the_next_commit(both):
    sides = both()
    seat(sides, [4])
    for step in range(2):
        one = recurrent.make_pass(WIDTH, [1], [10], seed=step)
        index, lens = recurrent.accepted(one, [2])
        for side in sides.values():
            recurrent.run_verify(side, one)
            recurrent.run_commit(side, one, index, lens)
        assert_equal_pools(sides)
        update_weights()
        for side in sides.values():
            for layer in side.layers:
                layer.A_log.mul_(0.5)
                layer.conv_weights = layer.conv_weights * 2


def update_weights():
    """As far as SGLang's updater goes before it writes."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater._assert_weight_cache_inactive(None, "a test")


def test_a_warm_up_compiles_the_commit_and_writes_nothing(make):
    side = make("wy")
    seat({"wy": side}, [4])
    runner = side.target_worker.model_runner
    wy.warm_up(runner, DEPTH, RUNNING)  # no layer has run: nothing to compile yet
    recurrent.run_verify(side, recurrent.make_pass(WIDTH, [1], [10]))
    before = [pool.clone() for pool in pools(side)]
    wy.warm_up(runner, DEPTH, RUNNING)
    assert all(torch.equal(pool, old) for pool, old in zip(pools(side), before, strict=True))


def test_prefill_goes_the_stock_way(make):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    side = make("wy")
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    found = wy.verify_layer(lambda *a, **k: (a, k), side.backend, "layer", batch, "x", "a", "b", q=None)
    assert found == ((side.backend, "layer", batch, "x", "a", "b"), {"q": None})


def test_an_idle_batch_commits_nothing(make):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    side = make("wy")
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    none = torch.empty(0, dtype=torch.int32)
    wy.commit_states(None, side.target_worker, batch, none, none, WIDTH)


def test_more_rows_than_the_stash_holds_and_other_types_are_refused(make):
    side = make("wy")
    one = recurrent.make_pass(WIDTH, [1], [10], padded=RUNNING + 2)
    with pytest.raises(ValueError, match=rf"allowed are up to {RUNNING + 1} x {WIDTH} rows of {CHANNELS}"):
        recurrent.run_verify(side, one, padded=RUNNING)
    one = recurrent.make_pass(WIDTH, [1], [10], dtype=torch.float16)
    with pytest.raises(ValueError, match=r"found inputs in torch\.float16, .* allowed is torch\.float32"):
        recurrent.run_verify(side, one)


def test_what_wy_does_not_know_stops_the_server(make):
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase

    side = make("wy")
    runner = side.target_worker.model_runner
    wy.refuse_backend(runner, side.backend)
    with pytest.raises(ArgumentError, match=r"found MambaAttnBackendBase, allowed with .* gated delta net"):
        wy.refuse_backend(runner, MambaAttnBackendBase.__new__(MambaAttnBackendBase))
    runner.dtype = torch.bfloat16
    with pytest.raises(ArgumentError, match=r"SGLANG_MAMBA_CONV_DTYPE: found torch\.float32"):
        wy.refuse_backend(runner, side.backend)
    runner.dtype = torch.float32
    side.pool.short_conv_pool = SimpleNamespace(enabled=True)
    with pytest.raises(ArgumentError, match=r"side states of its own \(short_conv_pool\)"):
        wy.refuse_backend(runner, side.backend)
    runner.req_to_token_pool = SimpleNamespace(mamba_pool=object())
    with pytest.raises(ArgumentError, match="a pool without a stash"):
        wy.refuse_backend(runner, side.backend)


def test_layers_that_are_no_gated_delta_nets_get_no_pool(make):
    params = recurrent.cache_params()
    odd = SimpleNamespace(shape=SimpleNamespace(conv=[(40, 3)], temporal=(2, 16, 16)), dtype=params.dtype)
    odd.is_kda = False
    with pytest.raises(ArgumentError, match=r'"state": "wy": found 40 convolution channels .* "snapshot"'):
        wy._layout(odd, layers=2, running=1, width=8)
    odd.is_kda = True
    with pytest.raises(ArgumentError, match="another kind of recurrent layer"):
        wy._layout(odd, layers=2, running=1, width=8)


def test_a_step_hands_its_trees_to_the_stash(make, monkeypatch):
    """The worker's own step, on a runner whose pool has a stash."""
    import numpy as np

    side = make("wy", 4)
    harness.patch_sglang(monkeypatch)
    rng = np.random.default_rng(0)
    logits = np.stack([harness.candidate_logits(rng, root) for root in harness.ROOTS])
    runner, recorded = harness.make_runner(monkeypatch, len(harness.ROOTS))
    runner.req_to_token_pool.mamba_pool = side.pool.mamba_pool
    worker = harness.make_worker(runner, recorded, logits, 4, Builder.BEST_FIRST)
    batch = harness.make_batch(runner, 4)
    committed = []
    monkeypatch.setattr(wy.commit, "commit_paths", lambda *arguments: committed.append(arguments))
    runner.attn_backend.linear_attn_backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([4, 7, 2, -1]))
    )
    monkeypatch.setattr(wy.Recurrent, "stacked", lambda self: None)
    with harness.configured(4):
        result = worker.forward_batch_generation(batch)
    trees = worker._tree_sampler.trees(3)
    stash = side.pool.mamba_pool.ddtree.stash
    assert stash.parents[:3].tolist() == trees.parents.tolist()
    ((_, _, _, _, slots, index, lens, track),) = committed
    assert slots.tolist() == [4, 7, 2]
    assert index.tolist() == result.accept_index.tolist()
    assert lens.tolist() == result.accept_lens.tolist()
    assert track is None
    assert SLOTS > 7


class Tokens:
    """A target whose recurrent layers see a row of a table for every token.

    Prefill is the plain recurrence; a verify pass is the plugin's own. `fault` is planted in the commit.
    """

    def __init__(self, side, runner):
        self.side, self.model_runner = side, runner
        self.pool = side.pool.mamba_pool
        generator = torch.Generator().manual_seed(5)
        sizes = (CHANNELS, HV, HV)
        self.tables = [
            [torch.randn(harness.VOCABULARY, size, generator=generator) for size in sizes] for _ in LAYER_IDS
        ]
        runner.forward = self.prefill

    def inputs(self, tokens):
        return [[table[tokens] for table in tables] for tables in self.tables]

    def prefill(self, forward_batch):
        tokens = forward_batch.input_ids
        cache = self.pool.mamba_cache
        if forward_batch.mamba_clear_indices is not None:
            self.pool.clear_slots(forward_batch.mamba_clear_indices)
        path, count = torch.arange(len(tokens))[None], torch.tensor([len(tokens)])
        for place, (layer, inputs) in enumerate(zip(self.side.layers, self.inputs(tokens), strict=True)):
            x, a, b = (one[None] for one in inputs)
            pools_of_layer = cache.conv[0][place], cache.temporal[place]
            commit_naive(
                x, a, b, layer.A_log, layer.dt_bias, layer.conv_weights, None, *pools_of_layer,
                torch.tensor([1]), path, count, key_heads=recurrent.H,
            )  # fmt: skip
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.zeros(1, 4)))

    def forward_batch_generation(self, batch, forward_batch, is_verify):
        cache, slots = self.pool.mamba_cache, torch.tensor([1])
        tokens = forward_batch.input_ids
        for place, (layer, inputs) in enumerate(zip(self.side.layers, self.inputs(tokens), strict=True)):
            self.pool.ddtree.verify(place, layer, *inputs, cache.conv[0][place], cache.temporal[place], slots)
        output = SimpleNamespace(next_token_logits=torch.zeros(len(tokens), 4))
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=False)


@pytest.fixture
def check_commits(make, monkeypatch):
    def run():
        side = make("wy")
        harness.patch_sglang(monkeypatch)
        monkeypatch.setattr(self_check, "PREFIX", 9)
        runner, recorded = harness.make_runner(monkeypatch, len(harness.ROOTS))
        runner.req_to_token_pool.mamba_pool = side.pool.mamba_pool
        runner.req_to_token_pool.req_index_to_mamba_index_mapping = torch.zeros(4, dtype=torch.int32)
        metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([1]))
        runner.attn_backend.linear_attn_backend = SimpleNamespace(forward_metadata=metadata)
        logits = torch.zeros(len(harness.ROOTS), harness.BLOCK - 1, harness.VOCABULARY).numpy()
        worker = harness.make_worker(runner, recorded, logits, WIDTH)
        worker._target_worker = Tokens(side, runner)
        with harness.configured(WIDTH):
            return wy_self_check.run(worker, trees=2)

    return run


def test_a_commit_that_is_right_passes_the_start_up_check(check_commits):
    report = check_commits()
    assert report["commits"] == 2
    assert report["state_error"] < 1e-4
    assert report["window_error"] == 0


@pytest.mark.parametrize("fault", ["nothing", "one node short", "rows in order", "not a number"])
def test_a_commit_that_is_wrong_stops_the_server(fault, check_commits, monkeypatch):
    right = wy.commit.commit_paths

    def wrong(stash, stacked, conv, states, slots, index, lens, track):
        if fault == "nothing":
            return
        if fault == "one node short":
            lens = lens - 1
        if fault == "rows in order":
            index = torch.arange(index.shape[1], dtype=torch.int32)[None]
        right(stash, stacked, conv, states, slots, index, lens, track)
        if fault == "not a number":
            states[:, 1, 0, 0, 0] = torch.nan

    monkeypatch.setattr(wy.commit, "commit_paths", wrong)
    with pytest.raises(SelfCheckError, match=r'states are off by .* serve with "state": "snapshot"'):
        check_commits()
