"""Safetensors checkpoints: opened, every tensor checked by name and shape, hashed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from ddtree_engine.reference.errors import InputError
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TensorSource(Protocol):
    """Where a model takes its tensors from, each once: see `Checkpoint`."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, of exactly `shape`."""
        ...

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Nothing more is taken."""
        ...


class Checkpoint:
    """The tensors of one folder. Each is taken once; what is left over at the end is an error."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = dtype
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        self._taken: set[str] = set()
        for path in shards(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            handle = safe_open(str(path), framework="pt")
            names: list[str] = list(handle.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: no readable safetensors file ({error})") from error
        for name in names:
            self._files[name] = handle
            self._where[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, of exactly `shape`, as `dtype` (the checkpoint's working dtype unless given).

        Raises `InputError` naming the file, the tensor, what was found and what is allowed.
        """
        if name not in self._where:
            raise InputError(f"{self.folder}: tensor {name} is missing, allowed is shape {list(shape)}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{self._where[name]}: tensor {name}: "
                f"found shape {list(tensor.shape)}, allowed is {list(shape)}"
            )
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            raise InputError(f"{self._where[name]}: tensor {name}: found {tensor.dtype}, allowed is {names}")
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{self._where[name]}: tensor {name}: found NaN or infinity, allowed are finite numbers"
            )
        self._taken.add(name)
        return tensor.to(dtype or self.dtype)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise `InputError` if tensors are left that nothing asked for; `ignored` prefixes may."""
        left = sorted(n for n in self._where if n not in self._taken and not n.startswith(ignored or ("\0",)))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise InputError(
                f"{self._where[left[0]]}: tensor {left[0]}{more}: found, but no layer of config.json has it"
            )


def fingerprint(folder: Path) -> str:
    """sha256 over config.json and the weight files, in name order."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *shards(folder)]:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def shards(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder. Raises `InputError` when there are none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if not single.is_file():
            raise InputError(f"{folder}: found neither {SINGLE} nor {INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: found no weight_map ({error!r})") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputError(f"{index}: weight_map: found {name!r}, allowed are files of {folder}")
    return [folder / name for name in names]
