"""Triton's interpreter, made fit to run these kernels on a CPU.

Triton 3.6's interpreter keeps bfloat16 as raw 16-bit words, and its `tl.dot` multiplies those words.
`prepare` replaces that one operation. Nothing here matters on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def prepare() -> None:
    """Let `tl.dot` of bfloat16 blocks multiply their values. Needs TRITON_INTERPRET=1."""
    import triton.language as tl
    from triton.runtime import interpreter

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(_: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(values(a), values(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
