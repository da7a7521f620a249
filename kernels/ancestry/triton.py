"""Ancestor bit rows on the GPU, for trees whose builder did not write them."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
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
