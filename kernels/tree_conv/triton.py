"""Causal depthwise convolution over a tree on the GPU: every node gathers its window through its ancestors.

All nodes in parallel: nothing is unrolled over them, so the compile time does not grow with the tree.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

MAX_TAPS = 8
BLOCK_NODES = 16
BLOCK_CHANNELS = 128


@triton.jit
def silu(x):
    """x * sigmoid(x), without overflow for any x."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _tree_conv_kernel(
    x,
    pool,
    slots,
    weight,
    bias,
    parents,
    o,
    Q,
    C,
    stride_xn,
    stride_xq,
    stride_slot,
    stride_pc,
    stride_pn,
    stride_pq,
    stride_on,
    stride_oq,
    stride_wc,
    stride_slots,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BQ: tl.constexpr,
    BC: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    nodes = tl.program_id(1) * BQ + tl.arange(0, BQ)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    x += request * stride_xn + channels[None, :]
    parents += request * stride_pn
    pool += slot * stride_slot + channels[None, :].to(tl.int64) * stride_pc
    valid_nodes = nodes < Q
    valid_channels = channels < C
    total = tl.zeros((BQ, BC), dtype=tl.float32)
    # From the node backwards: a row of x while `at` >= 0, then the carried inputs, the newest at -1.
    at = nodes
    for back in tl.static_range(TAPS):
        tap = TAPS - 1 - back
        in_tree = (at >= 0) & valid_nodes
        inputs = tl.load(
            x + at[:, None].to(tl.int64) * stride_xq,
            mask=in_tree[:, None] & valid_channels[None, :],
            other=0.0,
        ).to(tl.float32)
        if back > 0:
            carried = (at < 0) & valid_nodes & (slot >= 0)
            inputs += tl.load(
                pool + (TAPS - 1 + at)[:, None], mask=carried[:, None] & valid_channels[None, :], other=0.0
            ).to(tl.float32)
        w = tl.load(weight + channels * stride_wc + tap, mask=valid_channels, other=0.0).to(tl.float32)
        total += inputs * w[None, :]
        if tap > 0:
            parent = tl.load(parents + at * stride_pq, mask=in_tree & (at > 0), other=-1).to(tl.int32)
            at = tl.where(at > 0, tl.maximum(parent, -1), at - 1)
    if BIAS:
        total += tl.load(bias + channels, mask=valid_channels, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = silu(total)
    where = o + request * stride_on + nodes[:, None].to(tl.int64) * stride_oq + channels[None, :]
    tl.store(where, total.to(o.dtype.element_ty), mask=valid_nodes[:, None] & valid_channels[None, :])


def tree_conv(
    x: Tensor,
    conv_pool: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    *,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Convolve every node with the W - 1 inputs before it on its path; shapes as `tree_conv_naive`.

    x          [N, Q, C], unit stride over C (SGLang's [N * Q, C] projection viewed by request)
    conv_pool  [slots, C, W-1], unit stride over W-1;  slots  int[N], negative: no prefix
    weight     [C, W], W to 8, unit stride over W;  parents  int[N, Q]

    Returns [N, Q, C] in x's dtype. Raises `KernelInputError` naming the tensor.
    """
    if x.ndim != 3 or weight.ndim != 2 or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise KernelInputError(
            f"x, weight: found {list(x.shape)} and {list(weight.shape)}, "
            f"allowed are [N, Q, C] and [C, 1..{MAX_TAPS}]"
        )
    if activation not in ("silu", None):
        raise KernelInputError(f"activation: found {activation!r}, allowed are 'silu' and None")
    batch, width, channels = x.shape
    taps = weight.shape[1]
    expect_shape("weight", weight, (channels, taps))
    expect_shape("bias", bias, (channels,))
    expect_shape("conv_pool", conv_pool, (conv_pool.shape[0], channels, taps - 1))
    expect_shape("slots", slots, (batch,))
    expect_shape("parents", parents, (batch, width))
    expect_shape("out", out, (batch, width, channels))
    for name, tensor in (
        ("x", x),
        ("weight", weight),
        ("bias", bias),
        ("conv_pool", conv_pool),
        ("out", out),
    ):
        expect_dense(name, tensor, 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return tree_conv_unchecked(x, conv_pool, slots, weight, bias, parents, activation == "silu", out)


def tree_conv_unchecked(
    x: Tensor,
    conv_pool: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    silu_activation: bool,
    out: Tensor,
) -> Tensor:
    """The hot path of `tree_conv`: one launch, no check, no allocation."""
    batch, width, channels = x.shape
    grid = (triton.cdiv(channels, BLOCK_CHANNELS), triton.cdiv(width, BLOCK_NODES), batch)
    _tree_conv_kernel[grid](
        x,
        conv_pool,
        slots,
        weight,
        weight if bias is None else bias,
        parents,
        out,
        width,
        channels,
        x.stride(0),
        x.stride(1),
        conv_pool.stride(0),
        conv_pool.stride(1),
        parents.stride(0),
        parents.stride(1),
        out.stride(0),
        out.stride(1),
        weight.stride(0),
        slots.stride(0),
        TAPS=weight.shape[1],
        BIAS=bias is not None,
        SILU=silu_activation,
        BQ=BLOCK_NODES,
        BC=BLOCK_CHANNELS,
        num_warps=4,
    )
    return out
