"""Ancestor bit rows and depth-first walks on the GPU: once per step, the same for every layer."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from ddtree_kernels.ancestry.naive import DepthFirst
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

MAX_WIDTH = 128


@triton.jit
def _ancestor_bits_kernel(
    parents, bits, Q, stride_pn, stride_pq, BQ: tl.constexpr, DOUBLINGS: tl.constexpr, WORDS: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BQ)
    parent = tl.load(parents + request * stride_pn + rows * stride_pq, mask=rows < Q, other=-1).to(tl.int32)
    parent = tl.where(rows == 0, -1, parent)
    reach = ((parent[:, None] == rows[None, :]) | (rows[:, None] == rows[None, :])).to(tl.float16)
    for _ in tl.static_range(DOUBLINGS):
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    place = (1 << tl.arange(0, 32)).to(tl.int32)
    grouped = tl.reshape(reach.to(tl.int32), (BQ, BQ // 32, 32))
    words = tl.sum(grouped * place[None, None, :], axis=2)
    word = tl.arange(0, BQ // 32)
    where = bits + (request * Q + rows[:, None]) * WORDS + word[None, :]
    tl.store(where, words, mask=(rows[:, None] < Q) & (word[None, :] < WORDS))


@triton.jit
def _bit(bits, request, rows, start, Q, WORDS: tl.constexpr):
    """int32[rows, 32]: 1 where the column's node is the row's ancestor or itself."""
    word = tl.load(bits + (request * Q + rows) * WORDS + start // 32, mask=(rows < Q) & (start < Q), other=0)
    return (word[:, None] >> tl.arange(0, 32)[None, :]) & 1


@triton.jit
def _depth_first_kernel(
    parents, bits, order, reload, keep, Q, stride_pn, stride_pq, BQ: tl.constexpr, WORDS: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BQ)
    valid = rows < Q
    parent = tl.load(parents + request * stride_pn + rows * stride_pq, mask=valid, other=-2).to(tl.int32)
    # Rows beyond the tree are nobody's child and nobody's sibling.
    parent = tl.where(valid, tl.where(rows == 0, -1, tl.maximum(parent, -1)), -2 - rows)
    # A node's place: itself and, for it and every ancestor, what hangs on earlier siblings. 32 columns at a
    # time: a whole matrix does not fit into registers.
    skipped = rows * 0
    children = rows * 0
    for start in range(0, BQ, 32):
        columns = start + tl.arange(0, 32)
        above = tl.load(parents + request * stride_pn + columns * stride_pq, mask=columns < Q, other=-2)
        above = tl.where(
            columns < Q, tl.where(columns == 0, -1, tl.maximum(above.to(tl.int32), -1)), -2 - columns
        )
        subtree = tl.sum(_bit(bits, request, rows, start, Q, WORDS), axis=0)
        sibling = (parent[:, None] == above[None, :]) & (columns[None, :] < rows[:, None])
        skipped += tl.sum(tl.where(sibling, subtree[None, :], 0), axis=1)
        children += tl.sum((above[None, :] == rows[:, None]).to(tl.int32), axis=1)
    branches = (children > 1).to(tl.int32)
    place = rows * 0 - 1
    copy = rows * 0
    for start in range(0, BQ, 32):
        columns = start + tl.arange(0, 32)
        same = rows[:, None] == columns[None, :]
        step = tl.sum(tl.where(same, (skipped + 1)[:, None], 0), axis=0)
        branch = tl.sum(tl.where(same, branches[:, None], 0), axis=0)
        place += tl.sum(_bit(bits, request, rows, start, Q, WORDS) * step[None, :], axis=1)
        copy += tl.sum(tl.where(columns[None, :] < rows[:, None], branch[None, :], 0), axis=1)
    parent_place = rows * 0
    parent_copy = rows * 0
    for start in range(0, BQ, 32):
        columns = start + tl.arange(0, 32)
        same = rows[:, None] == columns[None, :]
        of_parent = parent[:, None] == columns[None, :]
        at = tl.sum(tl.where(same, place[:, None], 0), axis=0)
        number = tl.sum(tl.where(same, copy[:, None], 0), axis=0)
        parent_place += tl.sum(tl.where(of_parent, at[None, :], 0), axis=1)
        parent_copy += tl.sum(tl.where(of_parent, number[None, :], 0), axis=1)
    source = tl.where(parent < 0, -1, tl.where(parent_place == place - 1, -2, parent_copy))
    at = request * Q + place
    tl.store(order + at, rows, mask=valid)
    tl.store(reload + at, source, mask=valid)
    tl.store(keep + at, tl.where(branches > 0, copy, -1), mask=valid)


def depth_first(parents: Tensor, bits: Tensor, out: DepthFirst | None = None) -> DepthFirst:
    """The walk of `depth_first_naive` for int parents [N, Q <= 128] and their `ancestor_bits`: one launch."""
    batch, width = parents.shape
    if tuple(bits.shape) != (batch, width, (width + 31) // 32) or not 1 <= width <= MAX_WIDTH:
        raise KernelInputError(
            f"bits: found shape {list(bits.shape)}, allowed are those of parents {list(parents.shape)}"
        )
    if out is None:
        out = DepthFirst(
            *(torch.empty(batch, width, dtype=torch.int32, device=parents.device) for _ in range(3))
        )
    _depth_first_kernel[(batch,)](
        parents,
        bits,
        *out,
        width,
        parents.stride(0),
        parents.stride(1),
        BQ=max(32, triton.next_power_of_2(width)),
        WORDS=bits.shape[2],
        num_warps=4,
    )
    return out


def ancestor_bits(parents: Tensor, out: Tensor | None = None) -> Tensor:
    """int32[N, Q, ceil(Q / 32)] as `ancestor_bits_naive`, for int parents [N, Q <= 128] with any strides.

    Pointer doubling on tensor cores: one program per request, the same for every layer of a step.
    """
    if parents.ndim != 2 or not 1 <= parents.shape[1] <= MAX_WIDTH:
        raise KernelInputError(f"parents: found shape {list(parents.shape)}, allowed is [N, 1..{MAX_WIDTH}]")
    batch, width = parents.shape
    words = (width + 31) // 32
    if out is None:
        out = torch.empty(batch, width, words, dtype=torch.int32, device=parents.device)
    block = max(32, triton.next_power_of_2(width))
    _ancestor_bits_kernel[(batch,)](
        parents,
        out,
        width,
        parents.stride(0),
        parents.stride(1),
        BQ=block,
        DOUBLINGS=block.bit_length() - 1,
        WORDS=words,
        num_warps=8,
    )
    return out
