"""Commit on the GPU: replay the accepted path of every request through all layers in one launch.

Every program carries one tile of a head's state through the path in registers, in float32 and in the order of
a plain decode step: convolution (rounded to the stash's dtype, as a decode's is), l2-norm, gates, decay,
update. The state is read once and written once. The convolution windows follow in a second launch, because
the first reads them from every program.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_conv.triton import commit_window_unchecked, silu
from torch import Tensor

BLOCK_V = 32


@triton.jit
def _convolved(
    x,
    window,
    weight,
    bias,
    path,
    step,
    channels,
    valid,
    stride_xq,
    stride_pc,
    stride_wc,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """These channels after the convolution at the path's `step`-th node, rounded to x's dtype."""
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = step - (TAPS - 1 - tap)
        row = tl.load(path + at, mask=at >= 0, other=0).to(tl.int64)
        inputs = tl.load(x + row * stride_xq + channels, mask=valid & (at >= 0), other=0.0).to(tl.float32)
        carried = window + channels.to(tl.int64) * stride_pc + (TAPS - 1 + at)
        inputs += tl.load(carried, mask=valid & (at < 0), other=0.0).to(tl.float32)
        total += inputs * tl.load(weight + channels * stride_wc + tap, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channels, mask=valid, other=0.0).to(tl.float32)
    if SILU:
        total = silu(total)
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _commit_kernel(
    x,
    a,
    b,
    A_log,
    dt_bias,
    weight,
    bias,
    conv_pool,
    state_pool,
    slots,
    path,
    counts,
    track_counts,
    track_slots,
    N,
    stride_xl,
    stride_xn,
    stride_xq,
    stride_al,
    stride_an,
    stride_aq,
    stride_bl,
    stride_bn,
    stride_bq,
    stride_conv_layer,
    stride_conv_slot,
    stride_conv_c,
    stride_state_layer,
    stride_state_slot,
    stride_path,
    stride_wl,
    stride_wc,
    stride_bias,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TRACK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    head = tl.program_id(1)
    layer = (tl.program_id(2) // N).to(tl.int64)
    request = (tl.program_id(2) % N).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(counts + request).to(tl.int32)
    x += layer * stride_xl + request * stride_xn
    a += layer * stride_al + request * stride_an + head
    b += layer * stride_bl + request * stride_bn + head
    path += request * stride_path
    weight += layer * stride_wl
    bias += layer * stride_bias
    window = conv_pool + layer * stride_conv_layer + slot * stride_conv_slot
    rate = -tl.exp(tl.load(A_log + layer * HV + head).to(tl.float32))
    shift = tl.load(dt_bias + layer * HV + head).to(tl.float32)
    keys = tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    valid_k = keys < K
    valid_v = values < V
    key_channels = H * K + (head // (HV // H)) * K + keys
    value_channels = 2 * H * K + head * V + values
    tile = head.to(tl.int64) * K * V + values[:, None] * K + keys[None, :]
    pool = state_pool + layer * stride_state_layer
    mask = valid_v[:, None] & valid_k[None, :]
    state = tl.load(pool + slot * stride_state_slot + tile, mask=mask, other=0.0).to(tl.float32)
    track = -1
    target = slot
    if TRACK:
        target = tl.load(track_slots + request).to(tl.int64)
        track = tl.where(target >= 0, tl.load(track_counts + request).to(tl.int32), -1)
    step = count * 0
    while step < count:
        if TRACK:  # noqa: SIM102
            if step == track:
                snapshot = state.to(state_pool.dtype.element_ty)
                tl.store(pool + target * stride_state_slot + tile, snapshot, mask=mask)
        row = tl.load(path + step).to(tl.int64)
        k = _convolved(
            x, window, weight, bias, path, step, key_channels, valid_k, stride_xq, stride_conv_c, stride_wc,
            TAPS, BIAS, SILU,
        )  # fmt: skip
        v = _convolved(
            x, window, weight, bias, path, step, value_channels, valid_v, stride_xq, stride_conv_c, stride_wc,
            TAPS, BIAS, SILU,
        )  # fmt: skip
        k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        gate = tl.load(a + row * stride_aq).to(tl.float32) + shift
        gate = tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(gate)), gate)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * stride_bq).to(tl.float32)))
        state *= tl.exp(rate * gate)
        u = (v - tl.sum(state * k[None, :], axis=1)) * beta
        state += u[:, None] * k[None, :]
        step += 1
    if TRACK:  # noqa: SIM102
        if track == count:
            snapshot = state.to(state_pool.dtype.element_ty)
            tl.store(pool + target * stride_state_slot + tile, snapshot, mask=mask)
    if count > 0:
        tl.store(pool + slot * stride_state_slot + tile, state.to(state_pool.dtype.element_ty), mask=mask)


def commit(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    path: Tensor,
    counts: Tensor,
    *,
    key_heads: int,
    activation: str | None = "silu",
    track_counts: Tensor | None = None,
    track_slots: Tensor | None = None,
) -> None:
    """Advance all layers' pools past the accepted nodes, in place: `commit_naive` with layers in front.

    x           [L, N, Q, C], stashed pre-convolution q, k, v side by side, C = 2 H K + HV V
    a, b        [L, N, Q, HV];  A_log, dt_bias  [L, HV]
    weight      [L, C, W];  bias  [L, C] or None
    conv_pool   [L, slots, C, W-1];  state_pool  [L, slots, HV, V, K], float32 or bfloat16
    slots       int[N], negative: padding, nothing is written;  path  int[N, P];  counts  int[N], 0..P
    key_heads   H
    track_counts, track_slots  int[N] each: snapshot after so many rows into that slot; negative: none

    Raises `KernelInputError` naming the tensor.
    """
    if x.ndim != 4 or state_pool.ndim != 5 or conv_pool.ndim != 4:
        raise KernelInputError(
            f"x, conv_pool, state_pool: found {x.ndim}, {conv_pool.ndim} and {state_pool.ndim} dimensions, "
            "allowed are [L, N, Q, C], [L, slots, C, W-1] and [L, slots, HV, V, K]"
        )
    layers, batch, width, channels = x.shape
    slot_count, heads, value_dim, key_dim = state_pool.shape[1:]
    if heads % key_heads or channels != 2 * key_heads * key_dim + heads * value_dim:
        raise KernelInputError(
            f"x: found C {channels}, allowed is 2 H K + HV V = "
            f"{2 * key_heads * key_dim + heads * value_dim} with HV a multiple of H"
        )
    expect_shape("a", a, (layers, batch, width, heads))
    expect_shape("b", b, (layers, batch, width, heads))
    expect_shape("A_log", A_log, (layers, heads))
    expect_shape("dt_bias", dt_bias, (layers, heads))
    expect_shape("weight", weight, (layers, channels, conv_pool.shape[3] + 1))
    expect_shape("bias", bias, (layers, channels))
    expect_shape("conv_pool", conv_pool, (layers, slot_count, channels, conv_pool.shape[3]))
    expect_shape("state_pool", state_pool, (layers, slot_count, heads, value_dim, key_dim))
    expect_shape("path", path, (batch, path.shape[1]))
    for name, tensor in (
        ("slots", slots),
        ("counts", counts),
        ("track_counts", track_counts),
        ("track_slots", track_slots),
    ):
        expect_shape(name, tensor, (batch,))
        expect_dense(name, tensor, 1)
    if (track_counts is None) != (track_slots is None):
        raise KernelInputError("track_counts, track_slots: found one of them, allowed are both or none")
    for name, tensor, dimensions in (
        ("x", x, 1),
        ("a", a, 1),
        ("b", b, 1),
        ("A_log", A_log, 2),
        ("dt_bias", dt_bias, 2),
        ("weight", weight, 1),
        ("bias", bias, 1),
        ("conv_pool", conv_pool, 1),
        ("state_pool", state_pool, 3),
        ("path", path, 1),
    ):
        expect_dense(name, tensor, dimensions)
    if activation not in ("silu", None):
        raise KernelInputError(f"activation: found {activation!r}, allowed are 'silu' and None")
    commit_unchecked(
        x, a, b, A_log, dt_bias, weight, bias, conv_pool, state_pool, slots, path, counts, key_heads,
        activation == "silu", track_counts, track_slots,
    )  # fmt: skip


def commit_unchecked(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    path: Tensor,
    counts: Tensor,
    key_heads: int,
    silu_activation: bool,
    track_counts: Tensor | None,
    track_slots: Tensor | None,
) -> None:
    """The hot path of `commit`: two launches, no check, no allocation, no synchronisation."""
    layers, batch = x.shape[:2]
    heads, value_dim, key_dim = state_pool.shape[2:]
    block_v = min(BLOCK_V, triton.next_power_of_2(value_dim))
    track = track_counts is not None and track_slots is not None
    _commit_kernel[(triton.cdiv(value_dim, block_v), heads, layers * batch)](
        x,
        a,
        b,
        A_log,
        dt_bias,
        weight,
        weight if bias is None else bias,
        conv_pool,
        state_pool,
        slots,
        path,
        counts,
        track_counts if track else counts,
        track_slots if track else slots,
        batch,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        a.stride(0),
        a.stride(1),
        a.stride(2),
        b.stride(0),
        b.stride(1),
        b.stride(2),
        conv_pool.stride(0),
        conv_pool.stride(1),
        conv_pool.stride(2),
        state_pool.stride(0),
        state_pool.stride(1),
        path.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if bias is None else bias.stride(0),
        H=key_heads,
        HV=heads,
        K=key_dim,
        V=value_dim,
        TAPS=weight.shape[2],
        BIAS=bias is not None,
        SILU=silu_activation,
        TRACK=track,
        BK=triton.next_power_of_2(key_dim),
        BV=block_v,
        num_warps=4,
    )
    commit_window_unchecked(x, conv_pool, slots, path, counts, track_counts, track_slots)
