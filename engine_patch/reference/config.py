"""The two model configurations, read from `config.json` and checked key by key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_engine.reference.errors import InputError

TARGET_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
# Drafters with these keys have marginals that are not independent, or parts that are not implemented.
UNSUPPORTED_DFLASH_KEYS = (
    "selector_rank",
    "selector_top_k",
    "conv_kernel_size",
    "conv_group_size",
    "projector_type",
)


@dataclass(frozen=True)
class TargetConfig:
    """A `qwen3_5_text` hybrid: gated delta nets with gated full attention in between."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @property
    def key_dim(self) -> int:
        """Channels of all GDN keys (and of all queries)."""
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all GDN values."""
        return self.value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the gated delta net layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)


@dataclass(frozen=True)
class DrafterConfig:
    """A `DFlashDraftModel`: block-diffusion drafter on the target's hidden states, embedding and head."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    causal: tuple[bool, ...]
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]


def read_target_config(folder: Path) -> TargetConfig:
    """Read and check a target's `config.json`. Raises `InputError` naming file, key, found and allowed."""
    top = _Keys.of_file(folder / "config.json")
    top.one_of_list("architectures", TARGET_ARCHITECTURES)
    text = top.nested("text_config") if "text_config" in top.data else top
    text.equals("hidden_act", "silu")
    text.equals("attn_output_gate", True, default=True)
    text.equals("attention_bias", False, default=False)
    layer_types = text.layer_types((LINEAR, FULL))
    rope = text.nested("rope_parameters")
    rope.equals("rope_type", "default", default="default")
    head_dim = text.integer("head_dim")
    rotary_dim = int(
        head_dim * rope.number("partial_rotary_factor", default=text.data.get("partial_rotary_factor", 1.0))
    )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise rope.wrong(
            "partial_rotary_factor", rotary_dim / head_dim, f"an even rotary size within head_dim {head_dim}"
        )
    section = rope.data.get("mrope_section")
    if section is not None and sum(section) * 2 != rotary_dim:
        raise rope.wrong("mrope_section", section, f"three numbers that add up to {rotary_dim // 2}")
    config = TargetConfig(
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        layer_types=layer_types,
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope.number("rope_theta"),
        key_heads=text.integer("linear_num_key_heads"),
        value_heads=text.integer("linear_num_value_heads"),
        key_head_dim=text.integer("linear_key_head_dim"),
        value_head_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", least=2),
        vocab_size=text.integer("vocab_size"),
        tie_word_embeddings=bool(
            text.data.get("tie_word_embeddings", top.data.get("tie_word_embeddings", False))
        ),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_positions=text.integer("max_position_embeddings"),
        eos_token_ids=_eos_ids(folder, top, text),
    )
    text.multiple("num_attention_heads", config.num_heads, "num_key_value_heads", config.num_kv_heads)
    text.multiple("linear_num_value_heads", config.value_heads, "linear_num_key_heads", config.key_heads)
    return config


def read_drafter_config(folder: Path, target: TargetConfig) -> DrafterConfig:
    """Read and check a drafter's `config.json` against its target."""
    keys = _Keys.of_file(folder / "config.json")
    keys.one_of_list("architectures", (DRAFTER_ARCHITECTURE,))
    keys.equals("hidden_act", "silu", default="silu")
    keys.equals("attention_bias", False, default=False)
    keys.equals("rope_scaling", None, default=None)
    keys.equals("hidden_size", target.hidden_size)
    keys.equals("vocab_size", target.vocab_size, default=target.vocab_size)
    keys.equals("num_target_layers", len(target.layer_types), default=len(target.layer_types))
    dflash = keys.nested("dflash_config")
    for name in UNSUPPORTED_DFLASH_KEYS:
        dflash.equals(name, None if dflash.data.get(name) is None else 0, default=None)
    layer_types = keys.layer_types((SLIDING, FULL), default=FULL)
    causal = keys.data.get("is_causal")
    rope = keys.nested("rope_parameters") if keys.data.get("rope_parameters") else keys
    rope.equals("rope_type", "default", default="default")
    block = dflash if "block_size" in dflash.data else keys
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=layer_types,
        # As SGLang 0.5.23: sliding layers are causal, full ones are not, unless the config says otherwise.
        causal=tuple(bool(causal) if causal is not None else kind == SLIDING for kind in layer_types),
        window=keys.integer("sliding_window") if SLIDING in layer_types else None,
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim"),
        rope_theta=rope.number("rope_theta"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        block_size=block.integer("block_size", least=2),
        mask_token_id=dflash.token("mask_token_id", target.vocab_size),
        target_layer_ids=dflash.layer_ids("target_layer_ids", len(target.layer_types)),
    )


def _eos_ids(folder: Path, top: _Keys, text: _Keys) -> tuple[int, ...]:
    """As SGLang: the union of config.json's and generation_config.json's."""
    found: list[Any] = [text.data.get("eos_token_id"), top.data.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(_Keys.of_file(generation).data.get("eos_token_id"))
    ids: set[int] = set()
    for entry in found:
        for token in entry if isinstance(entry, list) else [entry]:
            if token is None:
                continue
            if not isinstance(token, int):
                raise text.wrong("eos_token_id", entry, "a token id or a list of them")
            ids.add(token)
    return tuple(sorted(ids))


@dataclass(frozen=True)
class _Keys:
    """One JSON object of one file, with readers whose errors name file, key, found and allowed."""

    source: str
    data: dict[str, Any]

    @classmethod
    def of_file(cls, path: Path) -> _Keys:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise InputError(f"{path}: found no JSON ({error})") from error
        if not isinstance(data, dict):
            raise InputError(f"{path}: found {type(data).__name__}, allowed is an object")
        return cls(str(path), data)

    def wrong(self, key: str, found: object, allowed: str) -> InputError:
        return InputError(f"{self.source}: {key}: found {found!r}, allowed is {allowed}")

    def nested(self, key: str) -> _Keys:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return _Keys(f"{self.source}: {key}", value)

    def equals(self, key: str, allowed: object, **default: object) -> None:
        found = self.data.get(key, default.get("default", "nothing"))
        if found != allowed:
            raise self.wrong(key, found, repr(allowed))

    def one_of_list(self, key: str, allowed: Sequence[str]) -> None:
        found = self.data.get(key)
        if not isinstance(found, list) or not any(name in allowed for name in found):
            raise self.wrong(key, found, "one of " + ", ".join(allowed))

    def integer(self, key: str, least: int = 1) -> int:
        found = self.data.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.wrong(key, found, f"a whole number >= {least}")
        return found

    def token(self, key: str, vocab_size: int) -> int:
        found = self.data.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < vocab_size:
            raise self.wrong(key, found, f"a token id in [0, {vocab_size - 1}]")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.data.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or found <= 0:
            raise self.wrong(key, found, "a number above 0")
        return float(found)

    def layer_types(self, allowed: Sequence[str], default: str | None = None) -> tuple[str, ...]:
        count = self.integer("num_hidden_layers")
        found = self.data.get("layer_types", [default] * count if default else None)
        if not isinstance(found, list) or len(found) != count or any(kind not in allowed for kind in found):
            raise self.wrong("layer_types", found, f"{count} of {', '.join(allowed)}")
        return tuple(found)

    def layer_ids(self, key: str, layers: int) -> tuple[int, ...]:
        found = self.data.get(key)
        fits = (
            isinstance(found, list) and found and all(isinstance(i, int) and 0 <= i < layers for i in found)
        )
        if not fits or found is None:
            raise self.wrong(key, found, f"a list of the target's layers 0..{layers - 1}")
        return tuple(found)

    def multiple(self, key: str, value: int, of_key: str, of_value: int) -> None:
        if value % of_value:
            raise self.wrong(key, value, f"a multiple of {of_key} {of_value}")
