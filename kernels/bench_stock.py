"""SGLang's own tree kernels over all layers: the times that ours are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from ddtree_kernels.bench_inputs import Inputs, random_inputs
from ddtree_kernels.bench_timing import Place, timed

# id -> (N, Q)
VERIFY = {
    "verify-n1-q64": (1, 64),
    "verify-n4-q64": (4, 64),
    "verify-n8-q64": (8, 64),
    "verify-n1-q16": (1, 16),
    "verify-n1-q32": (1, 32),
    "verify-n4-q16": (4, 16),
}


def stock(place: Place) -> dict[str, Any]:
    """Every stock time, in one process: the import alone takes a quarter of a minute."""
    ops = "sglang.kernels.ops"
    recurrent = import_module(f"{ops}.attention.linear.fused_sigmoid_gating_recurrent")
    verify = recurrent.fused_sigmoid_gating_delta_rule_update
    convolve = import_module(f"{ops}.mamba.causal_conv1d_triton").causal_conv1d_update
    times: dict[str, Any] = {"sglang": getattr(import_module("sglang"), "__version__", None)}
    for name, (batch, width) in VERIFY.items():
        inputs = random_inputs(place.shape, batch, width, place.device)
        times[name] = timed(place, _stock_verify(place, verify, inputs))
    inputs = random_inputs(place.shape, 1, 64, place.device)
    start = time.perf_counter()
    work = _stock_convolution(place, convolve, inputs)
    work()
    torch.cuda.synchronize()
    times["conv-n1-q64"] = {"first_call_seconds": time.perf_counter() - start} | timed(place, work)
    return times


def _stock_verify(place: Place, kernel: Any, inputs: Inputs) -> Callable[[], None]:
    """SGLang's tree kernel over all layers; one scratch serves all, which makes no difference."""
    shape = place.shape
    _, batch, width, _ = inputs.x.shape
    rows = batch * width
    states = torch.empty(
        batch,
        width,
        shape.value_heads,
        shape.value_dim,
        shape.key_dim,
        dtype=torch.float32,
        device=place.device,
    )
    starts = torch.arange(0, rows + 1, width, dtype=torch.int32, device=place.device)
    slots, own = inputs.slots.int(), torch.arange(batch, dtype=torch.int32, device=place.device)
    parents = inputs.parents.clamp_min(0).int()

    def work() -> None:
        for layer in range(shape.layers):
            q, k, v = (t.reshape(1, rows, *t.shape[2:]) for t in inputs.qkv(layer))
            kernel(
                A_log=inputs.A_log[layer],
                a=inputs.a[layer].view(rows, -1),
                dt_bias=inputs.dt_bias[layer],
                softplus_beta=1.0,
                softplus_threshold=20.0,
                q=q,
                k=k,
                v=v,
                b=inputs.b[layer].view(rows, -1),
                initial_state_source=inputs.state_pool[layer],
                initial_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=starts,
                disable_state_update=True,
                intermediate_states_buffer=states,
                intermediate_state_indices=own,
                cache_steps=width,
                retrieve_parent_token=parents,
            )

    return work


def _stock_convolution(place: Place, kernel: Any, inputs: Inputs) -> Callable[[], None]:
    """SGLang's tree convolution over all layers, with the windows it keeps for every node."""
    shape = place.shape
    _, batch, width, channels = inputs.x.shape
    windows = torch.empty(batch, width, channels, shape.window - 1, dtype=inputs.x.dtype, device=place.device)
    first_child = torch.full((batch, width), -1, dtype=torch.int64)
    sibling = first_child.clone()
    parents = inputs.parents.cpu()
    for request in range(batch):
        for node in range(width - 1, 0, -1):
            parent = int(parents[request, node])
            sibling[request, node] = first_child[request, parent]
            first_child[request, parent] = node
    links = [links.to(place.device) for links in (first_child, sibling, parents.clamp_min(0))]
    own = torch.arange(batch, dtype=torch.int32, device=place.device)

    def work() -> None:
        for layer in range(shape.layers):
            kernel(
                inputs.x[layer].transpose(1, 2),
                inputs.conv_pool[layer],
                inputs.weight[layer],
                None,
                "silu",
                conv_state_indices=inputs.slots.int(),
                intermediate_conv_window=windows,
                intermediate_state_indices=own,
                retrieve_next_token=links[0],
                retrieve_next_sibling=links[1],
                retrieve_parent_token=links[2],
            )

    return work
