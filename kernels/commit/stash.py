"""Write down what goes into a layer, for its commit: one launch for three inputs of any pitch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

BLOCK = 1024


@triton.jit
def _stash_kernel(
    x,
    a,
    b,
    kept_x,
    kept_a,
    kept_b,
    C,
    HV,
    stride_x,
    stride_a,
    stride_b,
    stride_kept_x,
    stride_kept_a,
    stride_kept_b,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.load(x + row * stride_x + place, mask=place < C, other=0.0)
    tl.store(kept_x + row * stride_kept_x + place, channels, mask=place < C)
    # The gates are few: the first program of a row takes them, one block after the other.
    heads = tl.where(tl.program_id(0) == 0, HV, 0)
    head = tl.arange(0, BLOCK)
    gates = tl.load(a + row * stride_a + head, mask=head < heads, other=0.0)
    tl.store(kept_a + row * stride_kept_a + head, gates, mask=head < heads)
    gates = tl.load(b + row * stride_b + head, mask=head < heads, other=0.0)
    tl.store(kept_b + row * stride_kept_b + head, gates, mask=head < heads)


def stash(x: Tensor, a: Tensor, b: Tensor, kept_x: Tensor, kept_a: Tensor, kept_b: Tensor) -> None:
    """Copy a layer's inputs, row by row.

    x      [rows, C] and a, b [rows, HV <= 1024], unit stride over the last dimension, rows with any pitch
    kept_* tensors of the same shapes and types

    Raises `KernelInputError` naming the tensor.
    """
    if x.ndim != 2 or a.ndim != 2 or not 1 <= a.shape[1] <= BLOCK:
        raise KernelInputError(
            f"x, a: found shapes {list(x.shape)} and {list(a.shape)}, allowed are [rows, C] and "
            f"[rows, 1..{BLOCK}]"
        )
    rows, channels = x.shape
    for name, tensor, other in (("x", x, kept_x), ("a", a, kept_a), ("b", b, kept_b)):
        width = channels if name == "x" else a.shape[1]
        expect_shape(name, tensor, (rows, width))
        expect_shape(f"kept_{name}", other, (rows, width))
        expect_dense(name, tensor, 1)
        expect_dense(f"kept_{name}", other, 1)
        if tensor.dtype != other.dtype:
            raise KernelInputError(f"kept_{name}: found {other.dtype}, allowed is {name}'s {tensor.dtype}")
    _stash_kernel[(triton.cdiv(channels, BLOCK), rows)](
        x,
        a,
        b,
        kept_x,
        kept_a,
        kept_b,
        channels,
        a.shape[1],
        x.stride(0),
        a.stride(0),
        b.stride(0),
        kept_x.stride(0),
        kept_a.stride(0),
        kept_b.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )
