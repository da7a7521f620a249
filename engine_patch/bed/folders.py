"""Model folders of the wide pair: configs of the wide shapes, and the small pair's own weights and tokenizer.

The wide weights are made by the model classes of `sglang_models` while they load; what they need to know
about the map is in `config.json` under `ddtree_bed`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ddtree_engine.bed.embed import Bed, DrafterBed, Filling, Read, TargetBed, constant_channel
from ddtree_engine.bed.shapes import (
    DFLASH_27B,
    QWEN36_27B,
    DrafterShape,
    TargetShape,
    as_json,
    from_json,
)
from ddtree_engine.reference.checkpoint import fingerprint, shards
from ddtree_engine.reference.errors import InputError
from safetensors import safe_open
from torch import Tensor

KEY, SCHEMA = "ddtree_bed", 1
COPIED = ("*.safetensors", "*.safetensors.index.json", "tokenizer*.json", "generation_config.json")


@dataclass(frozen=True)
class Beds:
    """The two maps of one pair, with the configs that they were made of."""

    target: TargetBed
    drafter: DrafterBed
    target_config: Mapping[str, Any]
    drafter_config: Mapping[str, Any]


def reader(folder: Path) -> Read:
    """The tensors of a checkpoint folder by name; an unknown name raises `KeyError`."""
    files = {name: path for path in shards(folder) for name in _names(path)}

    def read(name: str) -> Tensor:
        with safe_open(str(files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return read


def beds_of(pair: Path, wide: TargetShape = QWEN36_27B, wide_drafter: DrafterShape = DFLASH_27B) -> Beds:
    """The maps of the pair in `pair`/target and `pair`/drafter into the wide shapes.

    Raises `InputError` when the pair does not fit, or has no constant channel.
    """
    target_config, drafter_config = _config(pair / "target"), _config(pair / "drafter")
    small, small_drafter = TargetShape.of(target_config), DrafterShape.of(drafter_config)
    constant = constant_channel(small, reader(pair / "target"), small_drafter, reader(pair / "drafter"))
    target = TargetBed.of(small, wide, constant, (small_drafter.captured, wide_drafter.captured))
    drafter = DrafterBed.of(small_drafter, wide_drafter, target)
    return Beds(target, drafter, target_config, drafter_config)


def write_folders(out: Path, pair: Path, beds: Beds, seed: int = 0) -> None:
    """Write `out`/target and `out`/drafter: some 35 MB for the shipped pair, whatever the wide shapes are."""
    for name, config in (("target", wide_target_config(beds)), ("drafter", wide_drafter_config(beds))):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        bed = beds.target if name == "target" else beds.drafter
        config[KEY] = bed_json(bed, seed) | {"pair_sha256": fingerprint(pair / name)}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        for pattern in COPIED:
            for path in (pair / name).glob(pattern):
                shutil.copyfile(path, folder / path.name)


def wide_target_config(beds: Beds) -> dict[str, Any]:
    """The small target's `config.json` with the wide shape, and a head of its own."""
    return dict(beds.target_config) | beds.target.wide.keys() | {"tie_word_embeddings": False}


def wide_drafter_config(beds: Beds) -> dict[str, Any]:
    """The small drafter's `config.json` with the wide shape; block and mask token stay."""
    config = dict(beds.drafter_config) | beds.drafter.wide.keys()
    captured = {"target_layer_ids": list(beds.drafter.wide.captured)}
    return config | {"dflash_config": beds.drafter_config["dflash_config"] | captured}


def bed_json(bed: Bed, seed: int) -> dict[str, Any]:
    """What stands under `ddtree_bed` in a wide `config.json`."""
    return {
        "schema": SCHEMA,
        "seed": seed,
        "small": as_json(bed.small),
        "wide": as_json(bed.wide),
        "places": list(bed.places),
        "constant": bed.constant,
    }


def bed_from_json(
    data: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str
) -> tuple[Bed, Filling]:
    """Inverse of `bed_json`, and the filling for tensors of `dtype` on `device`."""
    if data.get("schema") != SCHEMA:
        raise InputError(f"{KEY}: schema: found {data.get('schema')!r}, allowed is {SCHEMA}")
    places, constant = tuple(data["places"]), int(data["constant"])
    bed: Bed
    if "captured" in data["small"]:
        small = from_json(DrafterShape, data["small"])
        bed = DrafterBed(small, from_json(DrafterShape, data["wide"]), places, constant)
    else:
        bed = TargetBed(
            from_json(TargetShape, data["small"]), from_json(TargetShape, data["wide"]), places, constant
        )
    return bed, Filling(int(data["seed"]), dtype, device)


def _names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'}: no readable config ({error})") from error
    if config.get(KEY):
        raise InputError(f"{folder / 'config.json'}: is a bed already, allowed is the small pair itself")
    return config
