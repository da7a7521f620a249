"""Fresh memory is poisoned in every kernel test: an element that is never written shows up as NaN."""

from __future__ import annotations

import os

# Before anything imports triton: kernels run in its interpreter here.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from ddtree_kernels import interpreting

interpreting.prepare()


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
