"""The map itself: a tensor of a wide checkpoint from the small one's tensor of the same role.

Nothing is kept: a wide tensor is made from at most one small one, by name, so that a 54 GB model is made
one tensor at a time. With r = sqrt(wide hidden / small hidden) the wide residual is r times the small one in
the first columns and zero in the others. Its mean square is then the small one's, and an RMSNorm of the same
eps divides by the same number: what writes to the residual is multiplied by r, what reads it normed by 1/r.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from ddtree_engine.bed.places import Axis, drafter_axes, layer_places, target_axes
from ddtree_engine.bed.shapes import DrafterShape, TargetShape, check_drafter, check_target, scale
from ddtree_engine.reference.config import LINEAR
from ddtree_engine.reference.errors import InputError
from torch import Tensor

# Of the row in the head, on a channel that is at most some hundred times the normed constant.
UNUSED_LOGIT = -1e4
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DRAFTER_NORM = "norm.weight"

Read = Callable[[str], Tensor]
"""A tensor of the small checkpoint by its name."""


class Role(Enum):
    """What a tensor does with the residual stream."""

    READER = "reader"
    WRITER = "writer"
    INNER = "inner"
    # Reads features, which are r times the small ones, and writes a stream that is r times the small one.
    FEATURES = "features"
    # Gains of norms: 1 + weight in the target's, the weight itself in the drafter's and in the gated ones.
    SHIFTED_GAIN = "shifted gain"
    GAIN = "gain"


# What the small tensor is multiplied by, as a power of r, and what fills the wide one around it.
TREATMENT = {
    Role.READER: (-1, "random"),
    Role.WRITER: (1, "zero"),
    Role.INNER: (0, "random"),
    Role.FEATURES: (0, "zero"),
    Role.SHIFTED_GAIN: (0, "zero"),
    Role.GAIN: (0, "one"),
}


@dataclass(frozen=True)
class Rule:
    """How a tensor is embedded: its role and the names of its dimensions."""

    role: Role
    axes: tuple[str, ...]


_MLP = {
    "mlp.gate_proj.weight": Rule(Role.READER, ("inner", "hidden")),
    "mlp.up_proj.weight": Rule(Role.READER, ("inner", "hidden")),
    "mlp.down_proj.weight": Rule(Role.WRITER, ("hidden", "inner")),
}
_TARGET_LAYER = {
    "input_layernorm.weight": Rule(Role.SHIFTED_GAIN, ("hidden",)),
    "post_attention_layernorm.weight": Rule(Role.SHIFTED_GAIN, ("hidden",)),
} | _MLP
LINEAR_LAYER = _TARGET_LAYER | {
    "linear_attn.in_proj_qkv.weight": Rule(Role.READER, ("q k v", "hidden")),
    "linear_attn.in_proj_z.weight": Rule(Role.READER, ("values", "hidden")),
    "linear_attn.in_proj_b.weight": Rule(Role.READER, ("value heads", "hidden")),
    "linear_attn.in_proj_a.weight": Rule(Role.READER, ("value heads", "hidden")),
    "linear_attn.conv1d.weight": Rule(Role.INNER, ("q k v", "one", "taps")),
    "linear_attn.A_log": Rule(Role.INNER, ("value heads",)),
    "linear_attn.dt_bias": Rule(Role.INNER, ("value heads",)),
    "linear_attn.norm.weight": Rule(Role.GAIN, ("value",)),
    "linear_attn.out_proj.weight": Rule(Role.WRITER, ("hidden", "values")),
}
FULL_LAYER = _TARGET_LAYER | {
    "self_attn.q_proj.weight": Rule(Role.READER, ("q gate", "hidden")),
    "self_attn.k_proj.weight": Rule(Role.READER, ("kv", "hidden")),
    "self_attn.v_proj.weight": Rule(Role.READER, ("kv", "hidden")),
    "self_attn.q_norm.weight": Rule(Role.SHIFTED_GAIN, ("head",)),
    "self_attn.k_norm.weight": Rule(Role.SHIFTED_GAIN, ("head",)),
    "self_attn.o_proj.weight": Rule(Role.WRITER, ("hidden", "q")),
}
DRAFTER_LAYER = _MLP | {
    "input_layernorm.weight": Rule(Role.GAIN, ("hidden",)),
    "post_attention_layernorm.weight": Rule(Role.GAIN, ("hidden",)),
    "self_attn.q_proj.weight": Rule(Role.READER, ("q", "hidden")),
    "self_attn.k_proj.weight": Rule(Role.READER, ("kv", "hidden")),
    "self_attn.v_proj.weight": Rule(Role.READER, ("kv", "hidden")),
    "self_attn.q_norm.weight": Rule(Role.GAIN, ("head",)),
    "self_attn.k_norm.weight": Rule(Role.GAIN, ("head",)),
    "self_attn.o_proj.weight": Rule(Role.WRITER, ("hidden", "q")),
}
TARGET_TOP = {
    EMBEDDING: Rule(Role.WRITER, ("vocabulary", "hidden")),
    FINAL_NORM: Rule(Role.SHIFTED_GAIN, ("hidden",)),
    HEAD: Rule(Role.READER, ("vocabulary", "hidden")),
}
DRAFTER_TOP = {
    "fc.weight": Rule(Role.FEATURES, ("hidden", "features")),
    "hidden_norm.weight": Rule(Role.GAIN, ("hidden",)),
    DRAFTER_NORM: Rule(Role.GAIN, ("hidden",)),
}


@dataclass(frozen=True)
class Filling:
    """What the wide tensors are filled with; `dtype` is that of tensors without a small one in them."""

    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"

    def tensor(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`kind` is zero, one or random: uniform, so that a projection's outputs are of size 1.

        Every name has its own random numbers, whatever was made before.
        """
        if kind == "zero":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if kind == "one":
            return torch.ones(shape, dtype=dtype, device=self.device)
        make = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        bound = (3 / shape[-1]) ** 0.5 if len(shape) > 1 else 1.0
        return torch.empty(shape, dtype=dtype, device=self.device).uniform_(-bound, bound, generator=make)


@dataclass(frozen=True)
class TargetBed:
    """A small target in a wide one.

    `places` are the wide layers that its layers become, `constant` its residual channel that is 1 for every
    token (see `constant_channel`).
    """

    small: TargetShape
    wide: TargetShape
    places: tuple[int, ...]
    constant: int

    @classmethod
    def of(
        cls,
        small: TargetShape,
        wide: TargetShape,
        constant: int,
        captured: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> TargetBed:
        """`captured` are the layers that drafters read, of the small target and of the wide one."""
        check_target(small, wide)
        return cls(small, wide, layer_places(small.layers, wide.layers, *captured), constant)

    @cached_property
    def axes(self) -> Mapping[str, Axis]:
        """Dimensions by name."""
        return target_axes(self.small, self.wide)

    def names(self) -> Iterator[str]:
        """The wide checkpoint's tensors, in the order of a forward pass."""
        yield EMBEDDING
        for index, kind in enumerate(self.wide.layers):
            for name in _target_layer(kind):
                yield f"model.layers.{index}.{name}"
        yield FINAL_NORM
        yield HEAD

    def tensor(self, name: str, read: Read, filling: Filling) -> Tensor:
        """The wide checkpoint's tensor `name`. Raises `InputError` for a small tensor of another shape."""
        if name == HEAD:
            return self._head(read, filling)
        if name in TARGET_TOP:
            wide = _embedded(self, TARGET_TOP[name], name, name, read, filling)
            if name == FINAL_NORM:
                wide[self.constant] = 0.0  # gain 1
            return wide
        index, rest = _layer_name(name, "model.layers.")
        rule = _target_layer(self.wide.layers[index])[rest]
        origin = f"model.layers.{self.places.index(index)}.{rest}" if index in self.places else None
        return _embedded(self, rule, name, origin, read, filling)

    def _head(self, read: Read, filling: Filling) -> Tensor:
        """The small head / r, and rows that no token has.

        Both wide final norms let the constant channel pass. The small pair's tokens don't read it; the other
        rows read nothing else, which makes their probability zero: as zero rows they would all have logit 0.
        """
        try:
            small = read(HEAD)
        except KeyError:
            small = read(EMBEDDING)
        wide = _embedded(self, TARGET_TOP[HEAD], HEAD, HEAD, lambda _: small, filling, rest="zero")
        wide[: self.small.vocabulary, self.constant] = 0.0
        wide[self.small.vocabulary :, self.constant] = UNUSED_LOGIT
        return wide


@dataclass(frozen=True)
class DrafterBed:
    """A small drafter in a wide one, with the wide target's embedding and head."""

    small: DrafterShape
    wide: DrafterShape
    places: tuple[int, ...]
    constant: int

    @classmethod
    def of(cls, small: DrafterShape, wide: DrafterShape, target: TargetBed) -> DrafterBed:
        """Of the drafter that reads `target`."""
        check_drafter(small, wide, target.wide)
        return cls(small, wide, layer_places(small.layers, wide.layers), target.constant)

    @cached_property
    def axes(self) -> Mapping[str, Axis]:
        """Dimensions by name."""
        return drafter_axes(self.small, self.wide)

    def names(self) -> Iterator[str]:
        """The wide checkpoint's tensors."""
        yield from DRAFTER_TOP
        for index in range(len(self.wide.layers)):
            for name in DRAFTER_LAYER:
                yield f"layers.{index}.{name}"

    def tensor(self, name: str, read: Read, filling: Filling) -> Tensor:
        """The wide checkpoint's tensor `name`. Raises `InputError` for a small tensor of another shape."""
        if name in DRAFTER_TOP:
            wide = _embedded(self, DRAFTER_TOP[name], name, name, read, filling)
            if name == DRAFTER_NORM:
                wide[self.constant] = 1.0
            return wide
        index, rest = _layer_name(name, "layers.")
        origin = f"layers.{self.places.index(index)}.{rest}" if index in self.places else None
        return _embedded(self, DRAFTER_LAYER[rest], name, origin, read, filling)


Bed = TargetBed | DrafterBed


def tensors(bed: Bed, read: Read, filling: Filling) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole wide checkpoint, one at a time."""
    for name in bed.names():
        yield name, bed.tensor(name, read, filling)


def constant_channel(target: TargetShape, read: Read, drafter: DrafterShape, read_drafter: Read) -> int:
    """The residual channel that is 1 for every token, which no layer of the pair writes and no head reads.

    Raises `InputError` when there is none.
    """
    candidates = (read(EMBEDDING) == 1).all(dim=0) & (read(FINAL_NORM) == -1)
    candidates &= read_drafter(DRAFTER_NORM) == 0
    for index, kind in enumerate(target.layers):
        candidates &= _unwritten(_target_layer(kind), f"model.layers.{index}.", read)
    for index in range(len(drafter.layers)):
        candidates &= _unwritten(DRAFTER_LAYER, f"layers.{index}.", read_drafter)
    channels = candidates.nonzero().flatten().tolist()
    if not channels:
        raise InputError("the pair has no residual channel that is 1 for every token, unwritten and unread")
    return int(channels[0])


def _unwritten(rules: Mapping[str, Rule], prefix: str, read: Read) -> Tensor:
    writers = [name for name, rule in rules.items() if rule.role is Role.WRITER]
    return torch.stack([(read(prefix + name) == 0).all(dim=1) for name in writers]).all(dim=0)


def _target_layer(kind: str) -> Mapping[str, Rule]:
    return LINEAR_LAYER if kind == LINEAR else FULL_LAYER


def _layer_name(name: str, prefix: str) -> tuple[int, str]:
    match = re.fullmatch(re.escape(prefix) + r"(\d+)\.(.+)", name)
    if match is None:
        raise InputError(f"tensor {name}: no such tensor in the wide checkpoint")
    return int(match[1]), match[2]


def _embedded(
    bed: Bed, rule: Rule, name: str, origin: str | None, read: Read, filling: Filling, rest: str = ""
) -> Tensor:
    """The tensor of `rule`: the small tensor `origin` times its power of r in its place, the rest filled."""
    power, kind = TREATMENT[rule.role]
    axes = [bed.axes[axis] for axis in rule.axes]
    small = None if origin is None else read(origin).to(filling.device)
    dtype = filling.dtype if small is None else small.dtype
    wide = filling.tensor(rest or kind, name, tuple(axis.size for axis in axes), dtype)
    if small is None:
        return wide
    shape = tuple(len(axis.index) for axis in axes)
    if tuple(small.shape) != shape:
        raise InputError(f"tensor {origin}: found shape {list(small.shape)}, allowed is {list(shape)}")
    factor = float(scale(bed.small.hidden, bed.wide.hidden)) ** power
    wide[torch.meshgrid(*(axis.index.to(filling.device) for axis in axes), indexing="ij")] = small * factor
    return wide
