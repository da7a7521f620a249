"""Sizes of a target and a drafter, and which of them a small model shares with the wide one it goes into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ddtree_engine.reference.config import FULL, LINEAR, SLIDING
from ddtree_engine.reference.errors import InputError


@dataclass(frozen=True)
class TargetShape:
    """A `qwen3_5_text` hybrid. `key_dim` and `value_dim` are per head, `taps` is the convolution's width."""

    hidden: int
    inner: int
    vocabulary: int
    layers: tuple[str, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TargetShape:
        """From the keys of a `config.json`."""
        return cls(layers=tuple(config["layer_types"]), **_picked(config, TARGET_KEYS))

    def keys(self) -> dict[str, Any]:
        """The keys of a `config.json` that hold these sizes."""
        sizes = {key: getattr(self, name) for name, key in TARGET_KEYS.items()}
        layers = {"num_hidden_layers": len(self.layers), "layer_types": list(self.layers)}
        return sizes | layers | {"full_attention_interval": full_attention_interval(self.layers)}


@dataclass(frozen=True)
class DrafterShape:
    """A `DFlashDraftModel`; `captured` are the target layers whose outputs it reads, of `target_layers`."""

    hidden: int
    inner: int
    vocabulary: int
    layers: tuple[str, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    captured: tuple[int, ...]
    target_layers: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DrafterShape:
        """From the keys of a `config.json`."""
        return cls(
            layers=tuple(config["layer_types"]),
            captured=tuple(config["dflash_config"]["target_layer_ids"]),
            target_layers=config["num_target_layers"],
            **_picked(config, DRAFTER_KEYS),
        )

    def keys(self) -> dict[str, Any]:
        """The keys of a `config.json` that hold these sizes, without `dflash_config`."""
        sizes = {key: getattr(self, name) for name, key in DRAFTER_KEYS.items()}
        layers = {"num_hidden_layers": len(self.layers), "layer_types": list(self.layers)}
        return sizes | layers | {"num_target_layers": self.target_layers}


Shape = TypeVar("Shape", TargetShape, DrafterShape)

DRAFTER_KEYS = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
TARGET_KEYS = DRAFTER_KEYS | {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}

QWEN36_27B = TargetShape(
    hidden=5120,
    inner=17408,
    vocabulary=248320,
    layers=(LINEAR, LINEAR, LINEAR, FULL) * 16,
    q_heads=24,
    kv_heads=4,
    head_dim=256,
    key_heads=16,
    value_heads=48,
    key_dim=128,
    value_dim=128,
    taps=4,
)
DFLASH_27B = DrafterShape(
    hidden=5120,
    inner=17408,
    vocabulary=248320,
    layers=(SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    captured=(1, 16, 31, 46, 61),
    target_layers=64,
)


def full_attention_interval(layers: Sequence[str]) -> int:
    """n, where every n-th layer is full attention and no other: SGLang reads layer types from it.

    Raises `InputError` for layers without such an n.
    """
    interval = layers.index(FULL) + 1 if FULL in layers else 0
    if not interval or any((kind == FULL) != (i % interval == 0) for i, kind in enumerate(layers, start=1)):
        raise InputError(f"layers: found {', '.join(layers)}; allowed is full attention in every n-th")
    return interval


def scale(small: int, wide: int) -> int:
    """sqrt(wide / small) of two hidden sizes, a power of two: multiplying by it is exact in any float format.

    Raises `InputError` for other ratios.
    """
    root = math.isqrt(wide // small) if wide % small == 0 else 0
    if root == 0 or root * root * small != wide or root & (root - 1):
        raise InputError(
            f"hidden: found {wide} for a pair of {small}, "
            f"allowed is {small} times the square of a power of two"
        )
    return root


def check_target(small: TargetShape, wide: TargetShape) -> None:
    """Raise `InputError` naming the size of `wide` that `small` does not fit into."""
    scale(small.hidden, wide.hidden)
    _equal(small, wide, "head_dim", "key_dim", "value_dim", "taps")
    _room(small, wide, "inner", "vocabulary", "kv_heads", "key_heads")
    _room_in_groups(small, wide, "q_heads", "kv_heads")
    _room_in_groups(small, wide, "value_heads", "key_heads")


def check_drafter(small: DrafterShape, wide: DrafterShape, target: TargetShape) -> None:
    """The same for a drafter, and against the wide target that it reads."""
    scale(small.hidden, wide.hidden)
    _equal(small, wide, "head_dim")
    _room(small, wide, "inner", "kv_heads")
    _room_in_groups(small, wide, "q_heads", "kv_heads")
    if len(small.captured) != len(wide.captured):
        raise InputError(
            f"captured: found {len(wide.captured)} layers, allowed are the pair's {len(small.captured)}"
        )
    for name, found, allowed in (
        ("hidden", wide.hidden, target.hidden),
        ("vocabulary", wide.vocabulary, target.vocabulary),
        ("target_layers", wide.target_layers, len(target.layers)),
    ):
        if found != allowed:
            raise InputError(f"drafter's {name}: found {found}, allowed is the target's {allowed}")


def _picked(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int]:
    return {name: int(config[key]) for name, key in keys.items()}


def _equal(small: object, wide: object, *names: str) -> None:
    for name in names:
        if getattr(small, name) != getattr(wide, name):
            found, allowed = getattr(wide, name), getattr(small, name)
            raise InputError(f"{name}: found {found}, allowed is the pair's {allowed}")


def _room(small: object, wide: object, *names: str) -> None:
    for name in names:
        if getattr(small, name) > getattr(wide, name):
            found, allowed = getattr(wide, name), getattr(small, name)
            raise InputError(f"{name}: found {found}, allowed is the pair's {allowed} or more")


def _room_in_groups(small: object, wide: object, heads: str, groups: str) -> None:
    sizes = []
    for shape in (small, wide):
        each, rest = divmod(getattr(shape, heads), getattr(shape, groups))
        if rest:
            raise InputError(f"{heads}: found {getattr(shape, heads)}, allowed is a multiple of {groups}")
        sizes.append(each)
    if sizes[0] > sizes[1]:
        raise InputError(
            f"{heads} for each of {groups}: found {sizes[1]}, allowed is the pair's {sizes[0]} or more"
        )


def as_json(shape: TargetShape | DrafterShape) -> dict[str, Any]:
    """Plain JSON that `TargetShape(**...)` takes back once its lists are tuples; see `from_json`."""
    return {
        field.name: list(value) if isinstance(value := getattr(shape, field.name), tuple) else value
        for field in fields(shape)
    }


def from_json(kind: type[Shape], data: Mapping[str, Any]) -> Shape:
    """Inverse of `as_json`."""
    sizes: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
    return kind(**sizes)
