"""Where SGLang keeps, fills and commits the recurrent layers' per-node states, and what `wy` does instead.

`targets` is installed with the plugin's other hooks, and only when the configuration says `wy`: pools without
snapshots and with a stash, their bytes in SGLang's own plan, verify passes on our kernels, commits by replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from ddtree_engine.sglang_plugin.errors import ArgumentError
from ddtree_engine.sglang_plugin.names import MARKER
from ddtree_engine.sglang_plugin.wy import commit, verify
from ddtree_engine.sglang_plugin.wy.stash import Layout, Stash, allocate, layout_of, narrow

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

POOL = "sglang.srt.mem_cache.memory_pool.MambaPool.__init__"
POOL_BUDGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache"
VERIFY_LAYER = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend"
COMMIT = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"
# Every way of changing weights in a running server asks this first.
WEIGHTS_CHANGE = (
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ".WeightUpdater._assert_weight_cache_inactive"
)
GIB = 2**30


class Recurrent:
    """A pool's stash, and the layers that filled it.

    A layer is known from its first verify pass on, which is a warm-up: before any commit.

    stash     of the width that is being verified, which is the widest unless a step has set another
    narrower  width -> the stash of a narrower pass, in the same memory
    """

    def __init__(self, stash: Stash, narrower: Iterable[int] = ()) -> None:
        self.stash = stash
        self.narrower = {width: narrow(stash, width) for width in narrower}
        self.bytes = stash.bytes + sum(one.layout.shared_bytes for one in self.narrower.values())
        self.layers: dict[int, Any] = {}
        self._stacked: commit.Stacked | None = None
        self._epoch = -1

    def verify(self, index: int, layer: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """One layer of a pass; see `verify.verify_layer`."""
        self.layers[index] = layer
        return verify.verify_layer(self.stash, index, _weights(layer), *inputs)

    def stacked(self) -> commit.Stacked:
        """All layers' parameters as they are since weights last changed."""
        if self._stacked is None or self._epoch != _Epoch.weights:
            count = self.stash.layout.layers
            self._stacked = commit.stack([_weights(self.layers[index]) for index in range(count)])
            self._epoch = _Epoch.weights
        return self._stacked


class _Epoch:
    """How often this process's weights were about to change."""

    weights = 0


def targets() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The hooks of state `wy`: dotted name -> (hook, kind)."""
    from sglang.srt.plugins.hook_registry import HookType

    return {
        POOL: (pool_with_stash, HookType.AROUND),
        POOL_BUDGET: (budget_with_stash, HookType.AROUND),
        VERIFY_LAYER: (verify_layer, HookType.AROUND),
        COMMIT: (commit_states, HookType.AROUND),
        WEIGHTS_CHANGE: (weights_change, HookType.BEFORE),
    }


def recurrent_of(runner: Any) -> Recurrent | None:
    """A model runner's stash; None with snapshots, and for a model without recurrent layers."""
    pool = getattr(runner.req_to_token_pool, "mamba_pool", None)
    found: Recurrent | None = getattr(pool, "ddtree", None)
    return found


def pool_with_stash(original: Original, pool: Any, **arguments: Any) -> None:
    """The pool of recurrent states, without a snapshot for every node and with a stash instead."""
    width = arguments.get("speculative_num_draft_tokens")
    if width is None or not _serving():
        original(pool, **arguments)
        return
    original(pool, **{**arguments, "speculative_num_draft_tokens": None})
    plain = pool.mamba_cache
    # SGLang's own code asserts this type in a verify pass, and would fail loudly on what is None in it.
    pool.mamba_cache = type(pool).SpeculativeState(
        **{field.name: getattr(plain, field.name) for field in fields(plain)},
        intermediate_ssm=None,
        intermediate_conv_window=None,
    )
    pool._intermediate_conv_window_phys = []
    layout = _layout(
        arguments["cache_params"],
        layers=len(arguments["mamba_layer_ids"]),
        running=arguments["spec_state_size"],
        width=width,
    )
    pool.ddtree = Recurrent(allocate(layout, arguments["device"]), _narrower(width))
    pool.mem_usage += pool.ddtree.bytes / GIB
    logger.info(
        "%s: state wy: stash of %d rows x %d nodes: %.2f GiB; states of the nodes would take %.2f GiB",
        MARKER,
        layout.rows,
        width,
        pool.ddtree.bytes / GIB,
        layout.rows * width * arguments["cache_params"].mamba_cache_per_req / GIB,
    )


def budget_with_stash(original: Original, configurator: Any, total_rest_memory: float) -> float:
    """What the KV cache gets, in GiB: SGLang reserves Q states a request, here it is the stash."""
    from sglang.srt.runtime_context import get_schedule, get_spec

    spec = get_spec()
    if not _serving() or configurator.spec_algorithm.is_none():
        return float(original(configurator, total_rest_memory))
    params = configurator.mambaish_config.mamba2_cache_params
    layout = _layout(
        params,
        layers=len(params.layers),
        running=max(1, int(get_schedule().max_running_requests)),
        width=int(spec.speculative_num_draft_tokens),
    )
    taken = layout.total_bytes
    taken += sum(replace(layout, width=width).shared_bytes for width in _narrower(layout.width))
    # Its reserve is this number of states a request: with none it plans the states themselves only.
    with spec.override(speculative_num_draft_tokens=0):
        return float(original(configurator, total_rest_memory - taken / GIB))


def verify_layer(
    original: Original,
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **rest: Any,
) -> Any:
    """A gated delta net in a verify pass; prefill goes the stock way."""
    pool = backend.req_to_token_pool
    recurrent: Recurrent | None = getattr(pool.mamba_pool, "ddtree", None)
    if recurrent is None or not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer, forward_batch, mixed_qkv, a, b, **rest)
    cache = pool.mamba2_layer_cache(layer.layer_id)
    slots = backend.forward_metadata.mamba_cache_indices
    return recurrent.verify(
        pool.mamba_map[layer.layer_id], layer, mixed_qkv, a, b, cache.conv[0], cache.temporal, slots
    )


def commit_states(
    original: Original,
    target_worker: Any,
    batch: Any,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    draft_token_num: int,
    prepared_step_indices: Any = None,
) -> None:
    """After acceptance: the requests' states and convolution windows, and the prefix cache's snapshots."""
    runner = target_worker.model_runner
    recurrent = recurrent_of(runner)
    if recurrent is None:
        original(target_worker, batch, accept_lens, accept_index, draft_token_num, prepared_step_indices)
        return
    if batch.forward_mode.is_idle() or accept_index.numel() == 0:
        return
    cache = runner.req_to_token_pool.mamba_pool.mamba_cache
    # The slots that the pass read, not the request table: a finished request's row may have a new owner.
    slots = runner.attn_backend.linear_attn_backend.forward_metadata.mamba_cache_indices
    commit.commit_paths(
        recurrent.stash,
        recurrent.stacked(),
        cache.conv[0],
        cache.temporal,
        slots[: len(accept_lens)],
        accept_index,
        accept_lens,
        _track(batch, accept_lens),
    )


def weights_change(*arguments: Any, **options: Any) -> None:
    """Commits read a copy of the layers' small parameters: it is made again after this."""
    _Epoch.weights += 1


def refuse_backend(runner: Any, linear: Any) -> None:
    """Raise `ArgumentError` where the recurrent layers are not what `wy` was made for."""
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    allowed = 'allowed with "state": "wy" is'
    if type(linear) is not GDNAttnBackend:
        raise ArgumentError(
            f"recurrent layers: found {type(linear).__name__}, {allowed} SGLang's gated delta net "
            '(GDNAttnBackend); serve this model with "state": "snapshot"'
        )
    recurrent = recurrent_of(runner)
    if recurrent is None:
        raise ArgumentError(
            f'recurrent layers: found a pool without a stash, {allowed} SGLang\'s own pool; use "snapshot"'
        )
    pool = runner.req_to_token_pool
    kept = recurrent.stash.layout.dtype
    if runner.dtype != kept:
        raise ArgumentError(f"SGLANG_MAMBA_CONV_DTYPE: found {kept}, {allowed} the model's {runner.dtype}")
    for name in ("short_conv_pool", "ngram_pool"):
        if getattr(getattr(pool, name, None), "enabled", False):
            raise ArgumentError(f"target: found side states of its own ({name}), {allowed} a model without")


def scratch_bytes(runner: Any) -> int:
    """Bytes of what this rank keeps for a verify pass's recurrent layers: the stash, or the snapshots."""
    recurrent = recurrent_of(runner)
    if recurrent is not None:
        return recurrent.bytes
    cache = getattr(getattr(runner.req_to_token_pool, "mamba_pool", None), "mamba_cache", None)
    states = getattr(cache, "intermediate_ssm", None)
    windows = getattr(cache, "intermediate_conv_window", None) or []
    kept = [*([] if states is None else [states]), *windows]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def warm_up(runner: Any, depth: int, most: int) -> None:
    """Compile the commit for every kind of batch size before the first request waits for it.

    Triton compiles anew for a size of 1 and for multiples of 16. Nothing is written: all slots are padding.
    """
    recurrent = recurrent_of(runner)
    if recurrent is None or len(recurrent.layers) < recurrent.stash.layout.layers:
        return
    pool = runner.req_to_token_pool
    cache = pool.mamba_pool.mamba_cache
    device = cache.temporal.device
    for requests in {min(size, most) for size in (1, 2, 16)}:
        lens = torch.ones(requests, dtype=torch.int32, device=device)
        nowhere = torch.full_like(lens, -1)
        track = commit.Track(nowhere, nowhere) if pool.enable_mamba_extra_buffer else None
        paths = torch.zeros(requests, depth, dtype=torch.int32, device=device)
        commit.commit_paths(
            recurrent.stash, recurrent.stacked(), cache.conv[0], cache.temporal, nowhere, paths, lens, track
        )


def _serving() -> bool:
    from ddtree_engine.sglang_plugin.config import StateStore, load_config
    from ddtree_engine.sglang_plugin.hooks import is_ours
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = load_config()
    return (
        config.state is StateStore.WY
        and config.verifies_tree
        and is_ours(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm))
    )


def _narrower(width: int) -> list[int]:
    """Widths that are verified besides the widest."""
    from ddtree_engine.sglang_plugin.config import load_config

    return [one for one in load_config().widths if one < width]


def _layout(params: Any, *, layers: int, running: int, width: int) -> Layout:
    """The layout of a pool; one row more than may run, as SGLang's own per-request buffers have."""
    try:
        if len(params.shape.conv) != 1 or params.is_kda:
            raise ValueError("found another kind of recurrent layer, allowed are gated delta nets")
        return layout_of(
            params.shape.conv[0],
            params.shape.temporal,
            layers=layers,
            rows=running + 1,
            width=width,
            dtype=params.dtype.conv,
        )
    except ValueError as error:
        message = f'target with "state": "wy": {error}; serve it with "state": "snapshot"'
        raise ArgumentError(message) from error


def _weights(layer: Any) -> verify.Weights:
    return verify.Weights(layer.conv_weights, layer.bias, layer.A_log, layer.dt_bias, layer.activation)


def _track(batch: Any, accept_lens: torch.Tensor) -> commit.Track | None:
    from sglang.srt.runtime_context import mamba_track_grid

    if batch.mamba_track_indices is None:
        return None
    grid = mamba_track_grid(batch.tree_cache.page_size)
    return commit.track_at(batch.seq_lens, accept_lens, grid, batch.mamba_track_indices)
