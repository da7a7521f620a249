"""What a verify pass keeps for every node of its trees, and what fits on a card.

Stock SGLang keeps a copy of every recurrent layer's state for every node of every running request: with
Qwen3.6-27B 147 MiB a node in float32. With state `wy` it is what went into those layers, 0.95 MiB. The
buffers are allocated at start, for one request more than may run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_engine.sglang_plugin.errors import ArgumentError

WIDTHS = (128, 64, 32, 16, 8)
MIB = 2**20
GIB = 2**30
# Two-dimensional weights that FP8 leaves as they are; a vision tower's are counted so to be safe.
KEPT = re.compile(r"embed_tokens|lm_head|visual\.")


@dataclass(frozen=True)
class RecurrentShape:
    """One rank's recurrent layers: counts, and bytes per element of the two kinds of state."""

    layers: int
    value_heads: int
    value_dim: int
    key_dim: int
    conv_channels: int
    conv_taps: int
    state_bytes: int
    conv_bytes: int

    @property
    def stash_bytes(self) -> int:
        """Bytes that one node takes with state `wy`: what went into its layers, in 16 bits."""
        return self.layers * (self.conv_channels + 2 * self.value_heads) * self.conv_bytes

    @property
    def node_bytes(self) -> int:
        """Bytes that one node of one request takes on this rank with its states kept."""
        state = self.value_heads * self.value_dim * self.key_dim * self.state_bytes
        conv = self.conv_channels * (self.conv_taps - 1) * self.conv_bytes
        return self.layers * (state + conv)


def recurrent_shape(
    text_config: Mapping[str, Any], *, state_bytes: int, conv_bytes: int = 2, tp: int = 1
) -> RecurrentShape | None:
    """The shape from a Qwen3-Next style text config; None for a model without recurrent layers.

    Raises `ArgumentError` when heads do not divide over the ranks.
    """
    if "linear_num_value_heads" not in text_config:
        return None
    layers = _recurrent_layers(text_config)
    if not layers:
        return None
    key_heads, value_heads = text_config["linear_num_key_heads"], text_config["linear_num_value_heads"]
    if key_heads % tp or value_heads % tp:
        raise ArgumentError(
            f"--tp-size {tp}: found {key_heads} key and {value_heads} value heads in the linear layers, "
            "allowed is a number of ranks that divides both"
        )
    key_dim, value_dim = text_config["linear_key_head_dim"], text_config["linear_value_head_dim"]
    return RecurrentShape(
        layers=layers,
        value_heads=value_heads // tp,
        value_dim=value_dim,
        key_dim=key_dim,
        conv_channels=(2 * key_heads * key_dim + value_heads * value_dim) // tp,
        conv_taps=text_config["linear_conv_kernel_dim"],
        state_bytes=state_bytes,
        conv_bytes=conv_bytes,
    )


def _recurrent_layers(text_config: Mapping[str, Any]) -> int:
    kinds = text_config.get("layer_types")
    if kinds:
        return sum(kind == "linear_attention" for kind in kinds)
    interval = text_config.get("full_attention_interval") or 4
    layers = int(text_config["num_hidden_layers"])
    return layers - layers // interval


def scratch_bytes(node_bytes: int, width: int, running: int) -> int:
    """Bytes of the per-node states at verify width Q with `running` requests at most."""
    return (running + 1) * width * node_bytes


def fitting_running(node_bytes: int, width: int, room: int, most: int) -> int:
    """Most running requests, at most `most`, whose states fit into `room` bytes; 0 when not even one does."""
    return max(0, min(most, room // (width * node_bytes) - 1))


def fitting_width(node_bytes: int, running: int, room: int) -> int | None:
    """Largest verify width whose states fit into `room` bytes; None when none does."""
    return next((width for width in WIDTHS if scratch_bytes(node_bytes, width, running) <= room), None)


def check_fits(node_bytes: int, width: int, running: int, room: int, *, stashed: bool = False) -> None:
    """Raise `ArgumentError` with bytes per node and what would fit when the states do not.

    stashed  a node takes its layers' inputs (state `wy`) and not their states
    """
    need = scratch_bytes(node_bytes, width, running)
    if need <= room:
        return
    best = fitting_width(node_bytes, running, room)
    fewer = fitting_running(node_bytes, width, room, running)
    remedies = []
    if best is not None:
        remedies.append(f"--speculative-num-draft-tokens {best} (budget {best - 1}) fits {running} requests")
    if fewer:
        remedies.append(f"--max-running-requests {fewer} fits width {width}")
    if not stashed:
        remedies.append("--mamba-ssm-dtype bfloat16 halves a node, at a loss of precision per tree level")
    remedies.append("more ranks (--tp-size) divide it")
    what = "stashed inputs" if stashed else "recurrent states"
    raise ArgumentError(
        f"verify width {width} with {running} running requests: found "
        f"({running}+1) x {width} nodes x {node_bytes / MIB:.1f} MiB = {need / GIB:.1f} GiB of {what}, "
        f"allowed is {room / GIB:.1f} GiB on this card; {'; '.join(remedies)}"
    )


def checkpoint_folder(model_path: str, cache: str | None = None) -> Path | None:
    """A checkpoint on this disk: the folder itself, or a hub name's snapshot in the cache; None if neither.

    cache  the hub cache's folder, by default the one that `huggingface_hub` uses
    """
    if not model_path:
        return None
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model_path, "config.json", cache_dir=cache)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def weight_bytes(folder: Path | None, quantization: str | None = None) -> int:
    """Bytes that a checkpoint takes once it is loaded; 0 for none.

    quantization  "fp8" shrinks linear layers while they load, unless the checkpoint is quantised already;
                  what any other scheme makes of it is not known, and counted as it is stored
    """
    if folder is None:
        return 0
    files = list(folder.glob("*.safetensors"))
    if quantization == "fp8" and "quantization_config" not in (_config_of(folder) or {}):
        return sum(_fp8_bytes(file) for file in files)
    return sum(file.stat().st_size for file in files)


def _fp8_bytes(file: Path) -> int:
    """Bytes of a file's tensors with a byte for every element of a linear layer's weight."""
    from safetensors import safe_open

    total = 0
    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dict
            tensor = tensors.get_slice(name)
            shape = tensor.get_shape()
            linear = len(shape) == 2 and name.endswith(".weight") and not KEPT.search(name)
            total += math.prod(shape) * (1 if linear else _stored_bytes(tensor.get_dtype()))
    return total


def _stored_bytes(dtype: str) -> int:
    """Of an element in safetensors' name of its type: BF16, F32, F8_E4M3, I64."""
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else int(digits[0]) // 8


def text_config_of(folder: Path | None) -> dict[str, Any] | None:
    """The text part of a checkpoint's config.json; None without one."""
    data = _config_of(folder)
    if data is None:
        return None
    nested = data.get("text_config")
    return nested if isinstance(nested, dict) else data


def _config_of(folder: Path | None) -> dict[str, Any] | None:
    if folder is None or not (file := folder / "config.json").is_file():
        return None
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data
