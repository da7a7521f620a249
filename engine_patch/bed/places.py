"""Where the layers, heads, channels and rows of the small pair go in the wide models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ddtree_engine.bed.shapes import DrafterShape, TargetShape
from ddtree_engine.reference.errors import InputError
from torch import Tensor


def layer_places(
    small: Sequence[str],
    wide: Sequence[str],
    small_captured: Sequence[int] = (),
    wide_captured: Sequence[int] = (),
) -> tuple[int, ...]:
    """The wide layer that each small layer becomes: in order, of its own type.

    The residual after wide layer `wide_captured[n]` is the one after `small_captured[n]` in the small model:
    no later small layer is placed up to there. Captured layers fall on the captured places themselves where
    the types agree, all others are as early as they can. Raises `InputError` when they don't fit.
    """
    captures = dict(zip(small_captured, wide_captured, strict=True))
    places: list[int] = []
    first = 0
    for index, kind in enumerate(small):
        last = captures.get(index)
        candidates = [i for i in range(first, len(wide) if last is None else last + 1) if wide[i] == kind]
        if not candidates:
            end = len(wide) - 1 if last is None else last
            raise InputError(f"layers: no {kind} is left in {first}..{end} for layer {index} of the pair")
        places.append(candidates[0] if last is None else candidates[-1])
        # Past a captured place even if the layer fell short of it: the capture must not see the next layer.
        first = max(places[-1], -1 if last is None else last) + 1
    return tuple(places)


@dataclass(frozen=True)
class Axis:
    """One dimension of a wide tensor: `size` entries, of which `index` int64 [n] are the small tensor's n."""

    size: int
    index: Tensor


def target_axes(small: TargetShape, wide: TargetShape) -> dict[str, Axis]:
    """The dimensions of a target's tensors by name."""
    keys = _heads(small.key_heads, 1, wide.key_heads, 1, small.key_dim)
    values = _groups(small, wide, "value_heads", "key_heads", small.value_dim)
    key_width, value_width = wide.key_heads * wide.key_dim, wide.value_heads * wide.value_dim
    mixed = torch.cat([keys, key_width + keys, 2 * key_width + values])
    return _shared_axes(small, wide) | {
        "vocabulary": Axis(wide.vocabulary, torch.arange(small.vocabulary)),
        # A head's query and then its gate.
        "q gate": Axis(
            wide.q_heads * 2 * wide.head_dim, _groups(small, wide, "q_heads", "kv_heads", 2 * small.head_dim)
        ),
        "q k v": Axis(2 * key_width + value_width, mixed),
        "values": Axis(value_width, values),
        "value heads": Axis(wide.value_heads, _groups(small, wide, "value_heads", "key_heads", 1)),
        "value": Axis(wide.value_dim, torch.arange(small.value_dim)),
        "taps": Axis(wide.taps, torch.arange(small.taps)),
        "one": Axis(1, torch.arange(1)),
    }


def drafter_axes(small: DrafterShape, wide: DrafterShape) -> dict[str, Axis]:
    """The dimensions of a drafter's tensors by name."""
    features = torch.arange(len(small.captured))[:, None] * wide.hidden + torch.arange(small.hidden)
    return _shared_axes(small, wide) | {
        "features": Axis(len(wide.captured) * wide.hidden, features.flatten()),
    }


def _shared_axes(small: TargetShape | DrafterShape, wide: TargetShape | DrafterShape) -> dict[str, Axis]:
    return {
        "hidden": Axis(wide.hidden, torch.arange(small.hidden)),
        "inner": Axis(wide.inner, torch.arange(small.inner)),
        "head": Axis(wide.head_dim, torch.arange(small.head_dim)),
        "q": Axis(wide.q_heads * wide.head_dim, _groups(small, wide, "q_heads", "kv_heads", small.head_dim)),
        "kv": Axis(
            wide.kv_heads * wide.head_dim, _heads(small.kv_heads, 1, wide.kv_heads, 1, small.head_dim)
        ),
    }


def _groups(small: object, wide: object, heads: str, groups: str, width: int) -> Tensor:
    """Heads that stay with the head they belong to: queries with their keys, values with theirs."""
    (few, each), (many, wide_each) = (
        (getattr(shape, groups), getattr(shape, heads) // getattr(shape, groups)) for shape in (small, wide)
    )
    return _heads(few, each, many, wide_each, width)


def _heads(groups: int, each: int, wide_groups: int, wide_each: int, width: int) -> Tensor:
    """Rows of `each` heads in each of `groups`, all of `width` rows, where groups hold `wide_each` heads."""
    assert groups <= wide_groups
    assert each <= wide_each
    head = torch.arange(groups)[:, None] * wide_each + torch.arange(each)
    return (head.flatten()[:, None] * width + torch.arange(width)).flatten()
