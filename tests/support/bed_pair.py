"""A tiny random pair with a constant residual channel, several kv and key heads, and a wide shape for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from ddtree_engine.bed.shapes import DrafterShape, TargetShape
from ddtree_engine.reference.config import FULL, LINEAR, SLIDING
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_pair import drafter_config, target_config, write_tokenizer

CONSTANT = 29
SMALL = TargetShape(
    hidden=32,
    inner=48,
    vocabulary=260,
    layers=(LINEAR, FULL, LINEAR, FULL, LINEAR),
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    key_heads=2,
    value_heads=4,
    key_dim=8,
    value_dim=8,
    taps=4,
)
SMALL_DRAFTER = DrafterShape(
    hidden=32,
    inner=48,
    vocabulary=260,
    layers=(SLIDING, SLIDING, FULL),
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    captured=(0, 2, 3),
    target_layers=5,
)
# r = 2; three heads to a group where the pair has two, in both kinds of layers.
WIDE = replace(
    SMALL,
    hidden=128,
    inner=72,
    vocabulary=1800,
    layers=(LINEAR, LINEAR, FULL) * 4,
    q_heads=9,
    kv_heads=3,
    key_heads=3,
    value_heads=9,
)
WIDE_DRAFTER = replace(
    SMALL_DRAFTER,
    hidden=128,
    inner=80,
    vocabulary=1800,
    q_heads=9,
    kv_heads=3,
    captured=(1, 5, 8),
    target_layers=12,
)
# Layer 5 is full attention: what is captured there fell short of it.
PLACES = (1, 2, 4, 8, 9)


def write_bed_pair(folder: Path, *, tied: bool = True, seed: int = 3) -> Path:
    """Write `folder`/target and `folder`/drafter; returns `folder`."""
    make = torch.Generator().manual_seed(seed)
    write_tokenizer(folder / "target")
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    config = target_config(SMALL.vocabulary, tied) | SMALL.keys()
    tensors = target_tensors(SMALL, make)
    if not tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "target" / "model.safetensors")
    (folder / "target" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    config = drafter_config(SMALL.vocabulary, 6) | SMALL_DRAFTER.keys()
    config["use_sliding_window"] = True
    config["dflash_config"] |= {"target_layer_ids": list(SMALL_DRAFTER.captured)}
    save_file(drafter_tensors(SMALL_DRAFTER, make), folder / "drafter" / "model.safetensors")
    (folder / "drafter" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def target_tensors(shape: TargetShape, make: torch.Generator) -> dict[str, Tensor]:
    """Random weights around the constant channel."""

    def normal(*size: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*size, generator=make) * scale

    hidden, dim = shape.hidden, shape.head_dim
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    tensors = {"model.embed_tokens.weight": normal(shape.vocabulary, hidden, scale=0.8)}
    tensors["model.embed_tokens.weight"][:, CONSTANT] = 1.0
    for index, kind in enumerate(shape.layers):
        name = f"model.layers.{index}."
        tensors |= _shared(name, hidden, shape.inner, normal, 0.0)
        if kind == LINEAR:
            name += "linear_attn."
            tensors[name + "in_proj_qkv.weight"] = normal(2 * keys + values, hidden)
            tensors[name + "in_proj_z.weight"] = normal(values, hidden)
            tensors[name + "in_proj_b.weight"] = normal(shape.value_heads, hidden)
            tensors[name + "in_proj_a.weight"] = normal(shape.value_heads, hidden)
            tensors[name + "conv1d.weight"] = normal(2 * keys + values, 1, shape.taps, scale=0.6)
            tensors[name + "A_log"] = torch.linspace(-3.0, 1.0, shape.value_heads)
            tensors[name + "dt_bias"] = normal(shape.value_heads)
            tensors[name + "norm.weight"] = 1 + normal(shape.value_dim, scale=0.1)
            tensors[name + "out_proj.weight"] = _writer(normal(hidden, values))
        else:
            tensors |= _attention(name, shape, 2 * dim, normal, 0.0)
    tensors["model.norm.weight"] = normal(hidden, scale=0.1)
    tensors["model.norm.weight"][CONSTANT] = -1.0
    return tensors


def drafter_tensors(shape: DrafterShape, make: torch.Generator) -> dict[str, Tensor]:
    """The same for the drafter."""

    def normal(*size: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*size, generator=make) * scale

    hidden = shape.hidden
    tensors = {
        "fc.weight": normal(hidden, len(shape.captured) * hidden),
        "hidden_norm.weight": 1 + normal(hidden, scale=0.1),
        "norm.weight": 1 + normal(hidden, scale=0.1),
    }
    tensors["norm.weight"][CONSTANT] = 0.0
    for index in range(len(shape.layers)):
        name = f"layers.{index}."
        tensors |= _shared(name, hidden, shape.inner, normal, 1.0)
        tensors |= _attention(name, shape, shape.head_dim, normal, 1.0)
    return tensors


def _shared(name, hidden, inner, normal, gain) -> dict[str, Tensor]:
    return {
        name + "input_layernorm.weight": gain + normal(hidden, scale=0.1),
        name + "post_attention_layernorm.weight": gain + normal(hidden, scale=0.1),
        name + "mlp.gate_proj.weight": normal(inner, hidden),
        name + "mlp.up_proj.weight": normal(inner, hidden),
        name + "mlp.down_proj.weight": _writer(normal(hidden, inner)),
    }


def _attention(name, shape, q_rows, normal, gain) -> dict[str, Tensor]:
    hidden, dim, name = shape.hidden, shape.head_dim, name + "self_attn."
    return {
        name + "q_proj.weight": normal(shape.q_heads * q_rows, hidden),
        name + "k_proj.weight": normal(shape.kv_heads * dim, hidden),
        name + "v_proj.weight": normal(shape.kv_heads * dim, hidden),
        name + "o_proj.weight": _writer(normal(hidden, shape.q_heads * dim)),
        name + "q_norm.weight": gain + normal(dim, scale=0.1),
        name + "k_norm.weight": gain + normal(dim, scale=0.1),
    }


def _writer(weight: Tensor) -> Tensor:
    weight[CONSTANT] = 0.0
    return weight
