"""HF-format checkpoints of the pair, bf16, split so that no file passes 12 MiB; reading them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pair.data import EOS
from pair.model import Drafter, DrafterShape, Target, TargetShape
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SHARD_BYTES = 12 * 2**20
MAX_POSITIONS = 32768


def save_target(target: Target, folder: Path) -> None:
    """Weights and config under HF's names (`model.layers...`); the head is tied."""
    assert_constant(target)
    folder.mkdir(parents=True, exist_ok=True)
    save_shards({f"model.{k}": v for k, v in target.state_dict().items()}, folder)
    write_json(folder / "config.json", target_config(target.shape))


def save_drafter(drafter: Drafter, target_shape: TargetShape, folder: Path) -> None:
    assert_constant(drafter)
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(drafter.state_dict(), folder)
    write_json(folder / "config.json", drafter_config(drafter.shape, target_shape))


def load_target(folder: Path) -> Target:
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = TargetShape(
        vocab=c["vocab_size"], hidden=c["hidden_size"], intermediate=c["intermediate_size"],
        layers=c["num_hidden_layers"], full_every=c["full_attention_interval"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], key_heads=c["linear_num_key_heads"],
        value_heads=c["linear_num_value_heads"], gdn_dim=c["linear_key_head_dim"],
    )  # fmt: skip
    target = Target(shape)
    state = {k.removeprefix("model."): v.float() for k, v in load_shards(folder).items()}
    target.load_state_dict(state)
    return target


def load_drafter(folder: Path) -> Drafter:
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = DrafterShape(
        hidden=c["hidden_size"], intermediate=c["intermediate_size"], layer_types=tuple(c["layer_types"]),
        features=tuple(c["dflash_config"]["target_layer_ids"]), heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], window=c["sliding_window"],
        rope_theta=c["rope_theta"], block=c["block_size"], mask_token=c["dflash_config"]["mask_token_id"],
    )  # fmt: skip
    drafter = Drafter(shape)
    drafter.load_state_dict({k: v.float() for k, v in load_shards(folder).items()})
    return drafter


@torch.no_grad()
def round_to_bf16_(module: nn.Module) -> None:
    """Make the weights exactly those that are saved, so that what is trained on them fits what is served."""
    for p in module.parameters():
        p.copy_(p.to(torch.bfloat16))


@torch.no_grad()
def assert_constant(model: Target | Drafter) -> None:
    """The constant channel as saved: ValueError if a layer writes it or the final norm lets it through."""
    c = model.shape.hidden - 1
    gain = model.norm.weight[c] + (1.0 if isinstance(model, Target) else 0.0)
    wrong = [] if float(gain) == 0.0 else ["norm"]
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) and bool(p[c].any()):
            wrong.append(name)
    if isinstance(model, Target) and not bool((model.embed_tokens.weight[:, c] == 1.0).all()):
        wrong.append("embed_tokens")
    if wrong:
        raise ValueError(f"the constant channel {c} is touched by {', '.join(wrong)}")


def target_config(s: TargetShape) -> dict[str, Any]:
    pairs = int(s.head_dim * s.rotary) // 2
    third = -(-pairs // 3)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "linear_conv_kernel_dim": s.conv,
        "linear_key_head_dim": s.gdn_dim,
        "linear_value_head_dim": s.gdn_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "full_attention_interval": s.full_every,
        "layer_types": ["full_attention" if s.is_full(i) else "linear_attention" for i in range(s.layers)],
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": s.eps,
        "vocab_size": s.vocab,
        "tie_word_embeddings": True,
        "use_cache": True,
        "partial_rotary_factor": s.rotary,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": int(s.rope_theta),
            "partial_rotary_factor": s.rotary,
            "mrope_interleaved": True,
            "mrope_section": [third, third, pairs - 2 * third],
        },
    }


def drafter_config(s: DrafterShape, target: TargetShape) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": s.block,
        "num_target_layers": target.layers,
        "dflash_config": {"mask_token_id": s.mask_token, "target_layer_ids": list(s.features)},
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": len(s.layer_types),
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "layer_types": list(s.layer_types),
        "sliding_window": s.window,
        "use_sliding_window": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": int(s.rope_theta),
        "rms_norm_eps": s.eps,
        "vocab_size": target.vocab,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }


def save_shards(state: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name in sorted(state):
        tensor = state[name].detach().to("cpu", torch.bfloat16).contiguous()
        size = tensor.numel() * 2
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= size
    for stale in folder.glob("*.safetensors*"):
        stale.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, Any] = {"metadata": {"total_size": sum(t.numel() * 2 for t in state.values())}}
    index["weight_map"] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, name)
    write_json(folder / "model.safetensors.index.json", index)


def load_shards(folder: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    if not out:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    return out


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
