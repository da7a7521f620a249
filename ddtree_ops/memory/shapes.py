"""Shapes of target and drafter, as their config.json gives them, and the bytes that follow from them.

Counts are per rank of tensor parallelism where a method takes `tp`; heads that do not divide are refused, KV
heads fewer than ranks are repeated (as SGLang does).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadInput

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
#: An FP8 checkpoint keeps one float32 scale for each block of 128 x 128 weights.
FP8_SCALE_BYTES = 4 / (128 * 128)


@dataclass(frozen=True)
class Attention:
    """Full-attention layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool

    def kv_bytes(self, *, tp: int, element: int) -> int:
        """Bytes of keys and values that one token takes on one rank."""
        return self.layers * max(1, self.kv_heads // tp) * 2 * self.head_dim * element


@dataclass(frozen=True)
class Recurrent:
    """Gated-delta layers."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """What the convolution runs over: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, *, tp: int, element: int) -> int:
        """One request's (or one snapshot's) recurrent states over all layers on one rank."""
        return self.layers * (self.value_heads // tp) * self.key_dim * self.value_dim * element

    def window_bytes(self, *, tp: int, columns: int | None = None, element: int = 2) -> int:
        """Convolution windows over all layers on one rank; `columns` defaults to taps - 1."""
        return self.layers * (self.channels // tp) * (self.taps - 1 if columns is None else columns) * element

    def stash_bytes(self, *, tp: int, element: int = 2) -> int:
        """One node's inputs for a replay at commit: q, k, v before the convolution, and the gates a and b."""
        return self.layers * (self.channels + 2 * self.value_heads) // tp * element


@dataclass(frozen=True)
class TargetShape:
    """A hybrid target."""

    name: str
    hidden: int
    ffn: int
    vocab: int
    layers: int
    attention: Attention
    recurrent: Recurrent
    context: int
    tied: bool
    dtype: str
    vision: Mapping[str, int] | None = None
    file_bytes: int | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the text model, counted layer by layer."""
        attention, recurrent, hidden = self.attention, self.recurrent, self.hidden
        rows = attention.heads * attention.head_dim
        full = hidden * rows * (2 if attention.gated else 1)
        full += 2 * hidden * attention.kv_heads * attention.head_dim + rows * hidden + 2 * attention.head_dim
        values = recurrent.value_heads * recurrent.value_dim
        linear = hidden * (recurrent.channels + values + 2 * recurrent.value_heads)
        linear += recurrent.channels * recurrent.taps + values * hidden
        linear += 2 * recurrent.value_heads + recurrent.value_dim
        every = 3 * hidden * self.ffn + 2 * hidden
        head = self.vocab * hidden * (1 if self.tied else 2) + hidden
        return attention.layers * full + recurrent.layers * linear + self.layers * every + head

    def weight_bytes(self, *, tp: int, dtype: str) -> int:
        """Weights on one rank: the checkpoint's files where they are known, else counted.

        With fp8, embedding, head and vision tower stay in bfloat16.
        """
        vision = _vision_parameters(self.vision) * 2
        if self.file_bytes is not None and dtype == self.dtype:
            return self.file_bytes // tp
        if dtype != "fp8":
            return (self.parameters * DTYPE_BYTES[dtype] + vision) // tp
        head = self.vocab * self.hidden * (1 if self.tied else 2)
        return int((self.parameters - head) * (1 + FP8_SCALE_BYTES) + head * 2 + vision) // tp

    def check_ranks(self, tp: int) -> None:
        """Raise BadInput when the heads do not divide over the ranks."""
        heads = {
            "attention heads": self.attention.heads,
            "linear key heads": self.recurrent.key_heads,
            "linear value heads": self.recurrent.value_heads,
        }
        for what, count in heads.items():
            if count % tp:
                raise BadInput(f"tp: found {tp}, allowed: a divisor of the {count} {what} of {self.name}")


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter: no embedding and no head of its own."""

    name: str
    hidden: int
    ffn: int
    features: int
    attention: Attention
    block: int
    file_bytes: int | None = None

    @property
    def parameters(self) -> int:
        attention, hidden = self.attention, self.hidden
        rows = attention.heads * attention.head_dim
        layer = (
            2 * hidden * rows + 2 * hidden * attention.kv_heads * attention.head_dim + 2 * attention.head_dim
        )
        layer += 3 * hidden * self.ffn + 2 * hidden
        return attention.layers * layer + self.features * hidden * hidden + 2 * hidden

    def weight_bytes(self, *, tp: int) -> int:
        return (self.file_bytes if self.file_bytes is not None else self.parameters * 2) // tp


#: Published shape of the text model; its vision tower is counted only from a real config.json.
QWEN_3_6_27B = TargetShape(
    name="Qwen/Qwen3.6-27B",
    hidden=5120,
    ffn=17408,
    vocab=248320,
    layers=64,
    attention=Attention(layers=16, heads=24, kv_heads=4, head_dim=256, gated=True),
    recurrent=Recurrent(layers=48, key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4),
    context=262144,
    tied=False,
    dtype="bfloat16",
)

#: Five layers and the block are published; width, heads and features are taken to be the target's kind.
QWEN_3_6_27B_DFLASH = DrafterShape(
    name="z-lab/Qwen3.6-27B-DFlash (heads and width assumed)",
    hidden=5120,
    ffn=17408,
    features=5,
    attention=Attention(layers=5, heads=32, kv_heads=8, head_dim=128, gated=False),
    block=16,
)

KNOWN_TARGETS = {"Qwen/Qwen3.6-27B": QWEN_3_6_27B}
KNOWN_DRAFTERS = {"z-lab/Qwen3.6-27B-DFlash": QWEN_3_6_27B_DFLASH}


def target_shape(model: str) -> TargetShape:
    """The shape of a checkpoint folder, a config.json or a known repository. Raises BadInput."""
    if model in KNOWN_TARGETS:
        return KNOWN_TARGETS[model]
    file, config = _config(model, "model", KNOWN_TARGETS)
    text = config.get("text_config", config)
    if "num_experts" in text or "linear_num_value_heads" not in text:
        kind = "experts" if "num_experts" in text else "no gated-delta layers"
        raise BadInput(
            f"{file}: model_type: found {config.get('model_type')!r} with {kind}, allowed: a dense hybrid"
        )
    value = _Reader(file, text)
    layers = value("num_hidden_layers")
    full = _full_layers(text, layers, value)
    return TargetShape(
        name=str(file.parent),
        hidden=value("hidden_size"),
        ffn=value("intermediate_size"),
        vocab=value("vocab_size"),
        layers=layers,
        attention=_attention(text, full, value, gated=bool(text.get("attn_output_gate", True))),
        recurrent=Recurrent(
            layers=layers - full,
            key_heads=value("linear_num_key_heads"),
            value_heads=value("linear_num_value_heads"),
            key_dim=value("linear_key_head_dim"),
            value_dim=value("linear_value_head_dim"),
            taps=value("linear_conv_kernel_dim"),
        ),
        context=value("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        dtype=_dtype(config, text),
        vision=config.get("vision_config"),
        file_bytes=_file_bytes(file.parent),
    )


def drafter_shape(drafter: str) -> DrafterShape:
    """Like :func:`target_shape`, for a DFlash drafter."""
    if drafter in KNOWN_DRAFTERS:
        return KNOWN_DRAFTERS[drafter]
    file, config = _config(drafter, "drafter", KNOWN_DRAFTERS)
    value = _Reader(file, config)
    dflash = config.get("dflash_config") or {}
    features = dflash.get("target_layer_ids")
    if not isinstance(features, list) or "block_size" not in config:
        raise BadInput(
            f"{file}: found no block_size and dflash_config.target_layer_ids, allowed: a DFlash drafter"
        )
    return DrafterShape(
        name=str(file.parent),
        hidden=value("hidden_size"),
        ffn=value("intermediate_size"),
        features=len(features),
        attention=_attention(config, value("num_hidden_layers"), value, gated=False),
        block=value("block_size"),
        file_bytes=_file_bytes(file.parent),
    )


class _Reader:
    """Whole numbers of a config.json, with a message that names the file and the key."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self._file = file
        self._config = config

    def __call__(self, key: str) -> int:
        found = self._config.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise BadInput.at(file=self._file, key=key, found=found, allowed="a whole number from 1")
        return found


def _config(model: str, key: str, known: Mapping[str, object]) -> tuple[Path, dict[str, Any]]:
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        allowed = f"a checkpoint folder, a config.json or {', '.join(known)}"
        raise BadInput.at(file=None, key=key, found=model, allowed=allowed)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: not JSON ({error})") from error
    text = config.get("text_config", {}) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise BadInput(f"{file}: found no mapping, allowed: a model's config.json")
    return file, config


def _full_layers(text: Mapping[str, Any], layers: int, value: _Reader) -> int:
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "full_attention" for kind in kinds)
    return layers // value("full_attention_interval")


def _attention(config: Mapping[str, Any], layers: int, value: _Reader, *, gated: bool) -> Attention:
    heads = value("num_attention_heads")
    head_dim = value("head_dim") if "head_dim" in config else value("hidden_size") // heads
    return Attention(layers, heads, value("num_key_value_heads"), head_dim, gated)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        return "fp8"
    found = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return found if found in DTYPE_BYTES else "bfloat16"


def _vision_parameters(vision: Mapping[str, int] | None) -> int:
    """Blocks, patch and position embeddings and the merger of a Qwen3-VL style tower."""
    if not vision:
        return 0
    hidden, ffn = vision.get("hidden_size", 0), vision.get("intermediate_size", 0)
    block = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
    patch = (
        vision.get("in_channels", 3)
        * vision.get("temporal_patch_size", 2)
        * vision.get("patch_size", 16) ** 2
    )
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    merger = merged * merged + merged * (vision.get("out_hidden_size", hidden) + 1)
    positions = vision.get("num_position_embeddings", 0)
    return vision.get("depth", 0) * block + (patch + positions) * hidden + merger


def _file_bytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder's safetensors files; null where none can be read."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                (header,) = struct.unpack("<Q", stream.read(8))
            total += file.stat().st_size - 8 - header
        except (OSError, struct.error):
            return None
    return total or None
