"""Commit on the GPU: replay the accepted path of every request through all layers, in two launches.

The first (`_commit_conv_kernel`) convolves the accepted rows of k and v, rounded to the stash's dtype as a
decode's are, normalises k in float32, moves the carried windows, and works out decay and beta of every head.
It leaves them in the order of the steps: step t in the stash's row t, k over the columns of q and k. In the
second (`_commit_kernel`) every program carries some rows of a head's state through the path in registers, in
float32 and in the order of a plain decode step: decay, what the key reads, update. The state is read once and
written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.commit.kernels import _commit_conv_kernel, _commit_kernel
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

# Leaves room for 15 one-warp programs of the convolution on a multiprocessor, and none of them spills.
CONV_REGISTERS = 136


@dataclass(frozen=True)
class CommitConfig:
    """How the two launches are cut.

    block_v, num_warps  rows of a state that a program of the replay carries, and its warps
    pieces              that a row's keys are cut into: 4 * pieces of its elements lie in one thread
    stages              steps of the replay whose keys are loaded at a time
    conv_warps          warps of a program of the convolution, which takes one head
    """

    block_v: int = 32
    num_warps: int = 2
    pieces: int = 4
    stages: int = 4
    conv_warps: int = 1


DEFAULT = CommitConfig()


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
    config: CommitConfig = DEFAULT,
) -> None:
    """Advance all layers' pools past the accepted nodes, in place: `commit_naive` with layers in front.

    A stash serves one commit: in x rows 0 to counts - 1 of every request are overwritten.

    x           [L, N, Q, C], stashed pre-convolution q, k, v side by side, C = 2 H K + HV V
    a, b        [L, N, Q, HV];  A_log, dt_bias  [L, HV]
    weight      [L, C, W];  bias  [L, C] or None
    conv_pool   [L, slots, C, W-1];  state_pool  [L, slots, HV, V, K], float32 or bfloat16
    slots       int[N], negative: padding, nothing is written;  counts  int[N], 0..P
    path        int[N, P], distinct rows; the convolution is unrolled over P, a drafter's block
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
    pitches = x.stride()[:3]
    if x.element_size() == 2 and (key_dim % 2 or any(pitch % 2 for pitch in pitches)):
        raise KernelInputError(f"x: found K {key_dim}, strides {pitches}; allowed are even ones in 16 bits")
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
        commit_facts(x, path, heads), config,
    )  # fmt: skip


def commit_facts(x: Tensor, path: Tensor, heads: int) -> Tensor:
    """Decay and beta of every step, float32 [L, N, HV, 2, P]; x and path as in `commit`."""
    return torch.empty((*x.shape[:2], heads, 2, path.shape[1]), dtype=torch.float32, device=x.device)


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
    facts: Tensor,
    config: CommitConfig = DEFAULT,
) -> None:
    """The hot path of `commit`: two launches, no check, no allocation, no synchronisation.

    facts  of `commit_facts`, written before it is read
    """
    convolve_unchecked(
        x, a, b, A_log, dt_bias, weight, bias, conv_pool, state_pool, slots, path, counts, key_heads,
        silu_activation, track_counts, track_slots, facts, config,
    )  # fmt: skip
    replay_unchecked(x, state_pool, slots, counts, key_heads, track_counts, track_slots, facts, config)


def convolve_unchecked(
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
    facts: Tensor,
    config: CommitConfig = DEFAULT,
) -> None:
    """The first launch: x, the windows and `facts` are written; of `state_pool` only the shape is read."""
    layers, batch = x.shape[:2]
    heads, value_dim, key_dim = state_pool.shape[2:]
    taps = weight.shape[2]
    track = track_counts is not None and track_slots is not None
    _commit_conv_kernel[(key_heads + heads, layers * batch)](
        x,
        a,
        b,
        A_log,
        dt_bias,
        weight,
        weight if bias is None else bias,
        conv_pool,
        slots,
        path,
        counts,
        track_counts if track else counts,
        track_slots if track else slots,
        facts,
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
        path.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if bias is None else bias.stride(0),
        H=key_heads,
        HV=heads,
        K=key_dim,
        V=value_dim,
        P=path.shape[1],
        TAPS=taps,
        BIAS=bias is not None,
        SILU=silu_activation,
        TRACK=track,
        BP=triton.next_power_of_2(path.shape[1]),
        BC=triton.next_power_of_2(max(key_dim, value_dim)),
        num_warps=config.conv_warps,
        maxnreg=CONV_REGISTERS,
    )


def replay_unchecked(
    x: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    counts: Tensor,
    key_heads: int,
    track_counts: Tensor | None,
    track_slots: Tensor | None,
    facts: Tensor,
    config: CommitConfig = DEFAULT,
) -> None:
    """The second launch: states move along the rows that the first has convolved."""
    layers, batch = x.shape[:2]
    heads, value_dim, key_dim = state_pool.shape[2:]
    block_v = min(config.block_v, triton.next_power_of_2(value_dim))
    track = track_counts is not None and track_slots is not None
    _commit_kernel[(triton.cdiv(value_dim, block_v), heads, layers * batch)](
        x,
        state_pool,
        slots,
        counts,
        track_counts if track else counts,
        track_slots if track else slots,
        facts,
        batch,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        state_pool.stride(0),
        state_pool.stride(1),
        H=key_heads,
        HV=heads,
        K=key_dim,
        V=value_dim,
        P=facts.shape[4],
        TRACK=track,
        BK=max(config.pieces, triton.next_power_of_2(key_dim)),
        BV=block_v,
        PIECES=config.pieces,
        STAGES=config.stages,
        num_warps=config.num_warps,
        num_stages=1,
    )
