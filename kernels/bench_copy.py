"""A copy on all multiprocessors, for the benchmark's bandwidth."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# 32 floats a thread: eight loads of 16 bytes on their way at once.
BLOCK = 8192


@triton.jit
def _copy_kernel(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < size, other=0.0), mask=place < size)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy contiguous float32 [elements]."""
    _copy_kernel[(triton.cdiv(source.numel(), BLOCK),)](
        source, target, source.numel(), BLOCK=BLOCK, num_warps=8
    )
