"""Triton's interpreter, made fit to run these kernels on a CPU.

Triton 3.6's interpreter keeps bfloat16 as raw 16-bit words, and its `tl.dot` multiplies those words; and it
cannot loop to a bound that a kernel computed, whose value it holds in an array of one element. `prepare`
replaces these two operations. Nothing here matters on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def prepare() -> None:
    """Let `tl.dot` multiply bfloat16 values and `range` take computed bounds. Needs TRITON_INTERPRET=1."""
    import triton.language as tl
    from triton.runtime import interpreter

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(_: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(values(a), values(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter.InterpreterBuilder.create_dot = create_dot
    patched, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, patch_tensor
