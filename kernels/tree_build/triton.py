"""Draft trees on the GPU, node for node those of the numpy builders in `ddtree_engine.tree`.

One program per request. Every node is a lane that holds its next offer: its best candidate not yet taken. A
step takes the highest offer of all lanes, the lowest lane on equal scores, and refreshes two lanes: the
parent's and the new node's. Scores are float32 sums in path order and the calibration is a table look-up,
without fused multiply-add, so that nothing depends on who computes it.

Rows that no candidate is left for become further children of the root with the root's token: valid drafts
that are right when they match, so that every row of a fixed-width verify pass is well defined.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

MAX_WIDTH = 128
MAX_TOPK = 32
# Said to ptxas, which otherwise saves registers for an occupancy that one program a request cannot have.
MAX_REGISTERS = 192
TABLE_STEPS = tl.constexpr(1024)

BuilderName = Literal["best-first", "spine-first", "calibrated"]


class Trees(NamedTuple):
    """N trees of Q rows; `counts` says how many are drafts or the root, the rest is padding.

    tokens, parents, depths, ranks  int64[N, Q] (root: parent -1);  scores  float32[N, Q]
    counts         int64[N];  positions  int64[N, Q]
    bits           int32[N, Q, ceil(Q / 32)], ancestor rows as `ddtree_kernels.ancestry.ancestor_bits_naive`
    first_child, next_sibling  int64[N, Q], -1 none
    selected_index int64[N, Q-1], parent_list int64[N, Q+1]: SGLang's tree builder with topk = Q, depth = 2
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    scores: Tensor
    counts: Tensor
    positions: Tensor
    bits: Tensor
    first_child: Tensor
    next_sibling: Tensor
    selected_index: Tensor
    parent_list: Tensor


class CalibrationTables(NamedTuple):
    """A calibration on the device, all float32; entry 0 of the first three is for the spine, 1 for off it.

    depth [2, F-1], rank [2, K], slope [2], floor [1]; value [1024], step [1024]: the log sigmoid's table
    """

    depth: Tensor
    rank: Tensor
    slope: Tensor
    floor: Tensor
    value: Tensor
    step: Tensor


@triton.jit
def _at(lane, values, index):
    """values[index] of a vector over lanes."""
    return tl.sum(tl.where(lane == index, values, 0))


@triton.jit
def _offer(
    logprobs,
    depth,
    off_spine,
    taken,
    columns,
    K,
    L,
    stride_ld,
    depth_bias,
    rank_bias,
    slope,
    floor,
    value,
    step,
    CALIBRATED: tl.constexpr,
):
    """A node's best candidate not taken: (edge score or -inf, column)."""
    inside = (columns < K) & (depth < L)
    lp = tl.load(logprobs + depth * stride_ld + columns, mask=inside, other=float("-inf")).to(tl.float32)
    lp = tl.where(lp == lp, tl.minimum(lp, 0.0), float("-inf"))
    edge = lp
    if CALIBRATED:
        x = tl.load(depth_bias + off_spine * L + depth, mask=depth < L, other=0.0)
        x = x + tl.load(rank_bias + off_spine * K + columns, mask=inside, other=0.0)
        x = x + tl.load(slope + off_spine) * tl.maximum(lp, tl.load(floor))
        t = (tl.minimum(tl.maximum(x, -32.0), 32.0) + 32.0) * 16.0
        i = tl.minimum(t.to(tl.int32), TABLE_STEPS - 1)
        edge = tl.minimum(tl.load(value + i) + (t - i.to(tl.float32)) * tl.load(step + i), 0.0)
        edge = tl.where(lp == float("-inf"), lp, edge)
    free = ((taken >> columns) & 1) == 0
    return tl.max(tl.where(free, edge, float("-inf")), axis=0, return_indices=True)


@triton.jit
def _tree_build_kernel(
    roots,
    ids,
    logprobs,
    prefix_lens,
    budgets,
    tokens,
    parents,
    depths,
    ranks,
    scores,
    counts,
    positions,
    bits,
    first_child,
    next_sibling,
    selected_index,
    parent_list,
    depth_bias,
    rank_bias,
    slope,
    floor,
    value,
    step,
    stride_in,
    stride_id,
    stride_ln,
    stride_ld,
    Q: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    SPINE: tl.constexpr,
    CALIBRATED: tl.constexpr,
    HAS_BUDGETS: tl.constexpr,
    WORDS: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    ids += request * stride_in
    logprobs += request * stride_ln
    lane = tl.arange(0, BQ)
    columns = tl.arange(0, BK)
    word = tl.arange(0, BW)
    root = tl.load(roots + request).to(tl.int64)
    limit = Q - 1
    if HAS_BUDGETS:
        limit = tl.load(budgets + request).to(tl.int32)

    token = tl.where(lane == 0, root, 0).to(tl.int64)
    parent = tl.where(lane == 0, -1, 0)
    depth = lane * 0
    rank = lane * 0
    score = lane.to(tl.float32) * 0.0
    off_spine = lane * 0
    taken = lane * 0
    child = lane * 0 - 1
    last_child = lane * 0 - 1
    sibling = lane * 0 - 1
    seen = tl.where((lane[:, None] == 0) & (word[None, :] == 0), 1, 0)
    edge, column = _offer(
        logprobs, 0, 0, 0, columns, K, L, stride_ld,
        depth_bias, rank_bias, slope, floor, value, step, CALIBRATED,
    )  # fmt: skip
    offer = tl.where(lane == 0, edge, float("-inf"))
    offer_column = tl.where(lane == 0, column, 0)
    count = 1
    on_spine = 1
    for node in range(1, Q):
        best, chosen = tl.max(offer, axis=0, return_indices=True)
        chosen_column = _at(lane, offer_column, chosen)
        if SPINE:
            # The chain of column 0 comes first, as far as it is possible.
            tail = node - 1
            spine_edge = tl.load(logprobs + tail * stride_ld, mask=tail < L, other=float("-inf")).to(
                tl.float32
            )
            spine_edge = tl.where(spine_edge == spine_edge, tl.minimum(spine_edge, 0.0), float("-inf"))
            on_spine = tl.where((spine_edge > float("-inf")) & (on_spine == 1), 1, 0)
            best = tl.where(on_spine == 1, _at(lane, score, tail) + spine_edge, best)
            chosen = tl.where(on_spine == 1, tail, chosen)
            chosen_column = tl.where(on_spine == 1, 0, chosen_column)
        real = tl.where(best > float("-inf"), 1, 0)
        if HAS_BUDGETS:
            real = tl.where(node <= limit, real, 0)
        chosen = tl.where(real == 1, chosen, 0)
        count += real
        above = _at(lane, depth, chosen)
        where = ids + above * stride_id + chosen_column
        new_token = tl.where(real == 1, tl.load(where, mask=real == 1, other=0).to(tl.int64), root)
        new_off = tl.where((chosen_column == 0) & (_at(lane, off_spine, chosen) == 0), 0, 1)
        here = lane == node
        of_parent = lane == chosen
        token = tl.where(here, new_token, token)
        parent = tl.where(here, chosen, parent)
        depth = tl.where(here, above + 1, depth)
        rank = tl.where(here & (real == 1), chosen_column, rank)
        score = tl.where(here, best, score)
        off_spine = tl.where(here, new_off, off_spine)
        seen_here = tl.sum(tl.where(of_parent[:, None], seen, 0), axis=0)
        seen_here |= tl.where(word == node // 32, 1 << (node % 32), 0)
        seen = tl.where(here[:, None], seen_here[None, :], seen)
        sibling = tl.where((lane == _at(lane, last_child, chosen)) & (lane > 0), node, sibling)
        child = tl.where(of_parent & (child < 0), node, child)
        last_child = tl.where(of_parent, node, last_child)
        if real == 1:
            used = _at(lane, taken, chosen) | (1 << chosen_column)
            taken = tl.where(of_parent, used, taken)
            edge, column = _offer(
                logprobs, above, _at(lane, off_spine, chosen), used, columns, K, L, stride_ld,
                depth_bias, rank_bias, slope, floor, value, step, CALIBRATED,
            )  # fmt: skip
            offer = tl.where(of_parent, score + edge, offer)
            offer_column = tl.where(of_parent, column, offer_column)
            edge, column = _offer(
                logprobs, above + 1, new_off, 0, columns, K, L, stride_ld,
                depth_bias, rank_bias, slope, floor, value, step, CALIBRATED,
            )  # fmt: skip
            offer = tl.where(here, best + edge, offer)
            offer_column = tl.where(here, column, offer_column)

    row = request * Q + lane
    valid = lane < Q
    tl.store(tokens + row, token, mask=valid)
    tl.store(parents + row, parent.to(tl.int64), mask=valid)
    tl.store(depths + row, depth.to(tl.int64), mask=valid)
    tl.store(ranks + row, rank.to(tl.int64), mask=valid)
    tl.store(scores + row, score, mask=valid)
    tl.store(counts + request, count)
    tl.store(positions + row, depth.to(tl.int64) + tl.load(prefix_lens + request).to(tl.int64), mask=valid)
    tl.store(first_child + row, child.to(tl.int64), mask=valid)
    tl.store(next_sibling + row, sibling.to(tl.int64), mask=valid)
    tl.store(bits + row[:, None] * WORDS + word[None, :], seen, mask=valid[:, None] & (word[None, :] < WORDS))
    selected = parent.to(tl.int64) * Q + lane
    inner = valid & (lane > 0)
    tl.store(selected_index + request * (Q - 1) + lane - 1, selected, mask=inner)
    tl.store(parent_list + request * (Q + 1) + lane, tl.where(lane == 0, -1, selected), mask=valid)
    tl.store(parent_list + request * (Q + 1) + Q, tl.full((), -1, tl.int64))


def empty_trees(batch: int, width: int, device: torch.device) -> Trees:
    """Buffers for `tree_build_unchecked`, to be kept across CUDA graph replays."""

    def int64(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    rows = (batch, width)
    words = (width + 31) // 32
    return Trees(
        tokens=int64(*rows),
        parents=int64(*rows),
        depths=int64(*rows),
        ranks=int64(*rows),
        scores=torch.empty(rows, dtype=torch.float32, device=device),
        counts=int64(batch),
        positions=int64(*rows),
        bits=torch.empty(batch, width, words, dtype=torch.int32, device=device),
        first_child=int64(*rows),
        next_sibling=int64(*rows),
        selected_index=int64(batch, width - 1),
        parent_list=int64(batch, width + 1),
    )


def tree_build(
    roots: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    width: int,
    prefix_lens: Tensor,
    *,
    builder: BuilderName = "best-first",
    calibration: CalibrationTables | None = None,
    budgets: Tensor | None = None,
    out: Trees | None = None,
) -> Trees:
    """Grow one tree of `width` rows per request.

    roots        int[N], the bonus tokens;  prefix_lens  int[N], tokens before the root
    ids          int[N, F-1, K <= 32], logprobs float[N, F-1, K], unit stride over K; NaN counts as -inf
    width        Q to 128, root included
    budgets      int[N]: at most so many drafts in a request's tree, the other rows are padding
    calibration  with builder "calibrated" and no other

    No synchronisation, and with `out` no allocation: fit for a CUDA graph. Raises `KernelInputError`.
    """
    if ids.ndim != 3 or not 1 <= ids.shape[2] <= MAX_TOPK:
        raise KernelInputError(f"ids: found shape {list(ids.shape)}, allowed is [N, F-1, 1..{MAX_TOPK}]")
    if not 1 <= width <= MAX_WIDTH:
        raise KernelInputError(f"width: found {width}, allowed is 1..{MAX_WIDTH}")
    if builder not in ("best-first", "spine-first", "calibrated"):
        raise KernelInputError(
            f"builder: found {builder!r}, allowed are 'best-first', 'spine-first', 'calibrated'"
        )
    if (builder == "calibrated") != (calibration is not None):
        raise KernelInputError("calibration: allowed with builder 'calibrated', which needs it")
    batch, positions, topk = ids.shape
    expect_shape("logprobs", logprobs, (batch, positions, topk))
    for name, tensor in (("roots", roots), ("prefix_lens", prefix_lens), ("budgets", budgets)):
        expect_shape(name, tensor, (batch,))
        expect_dense(name, tensor, 1)
    expect_dense("ids", ids, 1)
    expect_dense("logprobs", logprobs, 1)
    if calibration is not None:
        expect_shape("calibration depth", calibration.depth, (2, positions))
        expect_shape("calibration rank", calibration.rank, (2, topk))
    out = empty_trees(batch, width, ids.device) if out is None else out
    return tree_build_unchecked(roots, ids, logprobs, prefix_lens, builder, calibration, budgets, out)


def tree_build_unchecked(
    roots: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    prefix_lens: Tensor,
    builder: BuilderName,
    calibration: CalibrationTables | None,
    budgets: Tensor | None,
    out: Trees,
) -> Trees:
    """The hot path of `tree_build`: one launch, no check, no allocation, no synchronisation."""
    batch, positions, topk = ids.shape
    width, words = out.bits.shape[1:]
    tables = (logprobs,) * 6 if calibration is None else calibration
    _tree_build_kernel[(batch,)](
        roots,
        ids,
        logprobs,
        prefix_lens,
        roots if budgets is None else budgets,
        *out,
        *tables,
        ids.stride(0),
        ids.stride(1),
        logprobs.stride(0),
        logprobs.stride(1),
        Q=width,
        L=positions,
        K=topk,
        SPINE=builder == "spine-first",
        CALIBRATED=calibration is not None,
        HAS_BUDGETS=budgets is not None,
        WORDS=words,
        BQ=triton.next_power_of_2(width),
        BK=triton.next_power_of_2(topk),
        BW=triton.next_power_of_2(words),
        num_warps=1,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return out
