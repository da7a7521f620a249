"""Wide weights for the CPU engine, made when they are taken."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from ddtree_engine.bed.embed import Bed, Filling, Read
from ddtree_engine.bed.folders import KEY, bed_from_json, reader
from ddtree_engine.reference.errors import InputError
from torch import Tensor


class BedSource:
    """The tensors of a wide checkpoint that is stored nowhere, as a `TensorSource` of the CPU engine."""

    def __init__(self, bed: Bed, read: Read, filling: Filling) -> None:
        self.bed = bed
        self.read = read
        self.filling = filling
        self.left = set(bed.names())

    @classmethod
    def of_folder(cls, folder: Path, dtype: torch.dtype = torch.float32) -> BedSource:
        """The wide model that a folder of `write_folders` stands for."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        bed, filling = bed_from_json(config[KEY], dtype, "cpu")
        return cls(bed, reader(folder), filling)

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The wide tensor `name`. Raises `InputError` when unknown, taken already or of another shape."""
        if name not in self.left:
            raise InputError(f"tensor {name}: not in the wide checkpoint, or taken already")
        self.left.remove(name)
        tensor = self.bed.tensor(name, self.read, self.filling)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise InputError(f"tensor {name}: found shape {found}, allowed is {list(shape)}")
        return tensor.to(dtype or self.filling.dtype)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise `InputError` if tensors are left that nothing asked for."""
        left = sorted(name for name in self.left if not name.startswith(ignored or ("\0",)))
        if left:
            raise InputError(f"tensor {left[0]} and {len(left) - 1} more: no layer of config.json has them")
