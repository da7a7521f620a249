"""Lets SGLang's source import and resolve its arguments on a machine without a GPU.

Two things are stood in for, and nothing of SGLang itself:
- `sgl_kernel` (compiled CUDA kernels) and `torchvision` (its builds need a CUDA torch): every submodule and
  every name exists, using one fails;
- `torch.cuda`'s answers about the card, so that SGLang takes its CUDA branches: one fake H200.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from types import SimpleNamespace

import torch

VERSIONS = {"sgl_kernel": "0.4.10", "torchvision": "0.28.0"}
CARD_BYTES = 150_754_820_096


class Absent:
    """A name of a package that is not there: can be imported and passed on, not used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError(f"{self.__name__} is not there without a GPU")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in VERSIONS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        module.__version__ = VERSIONS[module.__name__.partition(".")[0]]  # type: ignore[attr-defined]


def install() -> None:
    """Call before the first import of sglang."""
    sys.meta_path.insert(0, _Finder())
    cuda = torch.cuda
    card = SimpleNamespace(
        name="Fake H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=CARD_BYTES,
        warp_size=32,
    )
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda *_: card.name
    cuda.get_device_capability = lambda *_: (card.major, card.minor)
    cuda.get_device_properties = lambda *_: card
    cuda.mem_get_info = lambda *_: (CARD_BYTES, CARD_BYTES)
    torch.version.cuda = "13.0"
