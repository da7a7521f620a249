"""Products of blocks on tensor cores, nearly to float32 accuracy."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

# What is shipped, three bfloat16 products (2^-16), and float32 products to hold it against.
Precision = Literal["bf16x3", "ieee"]


@triton.jit
def dot(x, y, PRECISION: tl.constexpr):
    """x @ y of float32 blocks. bf16x3 is split here: left to the compiler it spills on sm_90."""
    if PRECISION == "bf16x3":
        x_high = x.to(tl.bfloat16)
        y_high = y.to(tl.bfloat16)
        x_low = (x - x_high.to(tl.float32)).to(tl.bfloat16)
        y_low = (y - y_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def dot_stored(x, y, PRECISION: tl.constexpr):
    """x @ y for float32 x and y as stored: exact in y, x to 2^-17 when y is bfloat16."""
    if y.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, y, tl.dot(low, y))
    return dot(x, y.to(tl.float32), PRECISION)


@triton.jit
def dot_inputs(x, y, PRECISION: tl.constexpr):
    """x @ y of two inputs as stored: products of bfloat16 are exact in float32."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x, y)
    return dot(x.to(tl.float32), y.to(tl.float32), PRECISION)
