"""Fresh memory is poisoned in every kernel test: an element that is never written shows up as NaN."""

from __future__ import annotations

import os

# Before anything imports triton: kernels run in its interpreter here.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def _wide(handle):
    """A dot operand's values: the interpreter keeps bfloat16 as raw 16-bit words and would multiply those."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_wide(a), _wide(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _create_dot


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty`, `empty_like`, `Tensor.new_empty` give NaN (floats), the least value (ints) or True."""

    def poisoning(make):
        def poisoned(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            if tensor.dtype == torch.bool:
                return tensor.fill_(True)
            return tensor.fill_(torch.iinfo(tensor.dtype).min)

        return poisoned

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
