"""A tiny random target and drafter in Hugging Face format, with a byte tokenizer, for fast tests.

The head prefers a few popular tokens, so that a drafter that was never trained still hits now and then and
trees are walked several nodes deep.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
EOS_ID, MASK_ID = 2, 3
HIDDEN, LAYERS, BLOCK, POPULAR = 32, 4, 8, "aeinst"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_pair(
    folder: Path, *, seed: int = 7, tied: bool = False, prefix: str = "model.language_model.", window: int = 6
) -> Path:
    """Write `folder`/target and `folder`/drafter; returns `folder`."""
    make = torch.Generator().manual_seed(seed)
    write_tokenizer(folder / "target")
    vocabulary = len(SPECIAL) + 256
    write_target(folder / "target", make, vocabulary, tied, prefix)
    write_drafter(folder / "drafter", make, vocabulary, window)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes and four special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate(SPECIAL + ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[EOS_ID], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def target_config(vocabulary: int, tied: bool = False) -> dict[str, Any]:
    """Three gated delta nets and one full attention layer."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "eos_token_id": EOS_ID,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }


def write_target(folder: Path, make: torch.Generator, vocabulary: int, tied: bool, prefix: str) -> None:
    """Random weights; norms near 1, decays between slow and fast."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target_config(vocabulary, tied)

    def normal(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=make) * scale

    popular = torch.full((vocabulary, 1), 0.25)
    popular[[len(SPECIAL) + ALPHABET.index(letter) for letter in POPULAR]] = 1.6
    popular[: len(SPECIAL)] = 0.05
    tensors: dict[str, Tensor] = {
        prefix + "embed_tokens.weight": normal(vocabulary, HIDDEN, scale=1.0) * popular
    }
    for index, kind in enumerate(config["layer_types"]):
        name = f"{prefix}layers.{index}."
        tensors[name + "input_layernorm.weight"] = normal(HIDDEN, scale=0.1)
        tensors[name + "post_attention_layernorm.weight"] = normal(HIDDEN, scale=0.1)
        tensors[name + "mlp.gate_proj.weight"] = normal(48, HIDDEN)
        tensors[name + "mlp.up_proj.weight"] = normal(48, HIDDEN)
        tensors[name + "mlp.down_proj.weight"] = normal(HIDDEN, 48)
        if kind == "linear_attention":
            name += "linear_attn."
            tensors[name + "in_proj_qkv.weight"] = normal(64, HIDDEN)
            tensors[name + "in_proj_z.weight"] = normal(32, HIDDEN)
            tensors[name + "in_proj_b.weight"] = normal(4, HIDDEN)
            tensors[name + "in_proj_a.weight"] = normal(4, HIDDEN)
            tensors[name + "conv1d.weight"] = normal(64, 1, 4, scale=0.6)
            tensors[name + "A_log"] = torch.linspace(-3.0, 1.0, 4)
            tensors[name + "dt_bias"] = normal(4)
            tensors[name + "norm.weight"] = 1 + normal(8, scale=0.1)
            tensors[name + "out_proj.weight"] = normal(HIDDEN, 32)
        else:
            name += "self_attn."
            tensors[name + "q_proj.weight"] = normal(64, HIDDEN)
            tensors[name + "k_proj.weight"] = normal(16, HIDDEN)
            tensors[name + "v_proj.weight"] = normal(16, HIDDEN)
            tensors[name + "o_proj.weight"] = normal(HIDDEN, 32)
            tensors[name + "q_norm.weight"] = normal(16, scale=0.1)
            tensors[name + "k_norm.weight"] = normal(16, scale=0.1)
    tensors[prefix + "norm.weight"] = normal(HIDDEN, scale=0.1)
    if not tied:
        tensors["lm_head.weight"] = normal(vocabulary, HIDDEN, scale=0.5) * popular
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def drafter_config(vocabulary: int, window: int) -> dict[str, Any]:
    """Two sliding layers and a full one."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2, 3]},
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 10000000,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": window,
    }


def write_drafter(folder: Path, make: torch.Generator, vocabulary: int, window: int) -> None:
    """Random weights, without embedding and head as in published drafters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter_config(vocabulary, window)

    def normal(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=make) * scale

    tensors = {
        "fc.weight": normal(HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": 1 + normal(HIDDEN, scale=0.1),
        "norm.weight": 1 + normal(HIDDEN, scale=0.1),
    }
    for index in range(3):
        name = f"layers.{index}."
        tensors[name + "input_layernorm.weight"] = 1 + normal(HIDDEN, scale=0.1)
        tensors[name + "post_attention_layernorm.weight"] = 1 + normal(HIDDEN, scale=0.1)
        tensors[name + "self_attn.q_proj.weight"] = normal(32, HIDDEN)
        tensors[name + "self_attn.k_proj.weight"] = normal(16, HIDDEN)
        tensors[name + "self_attn.v_proj.weight"] = normal(16, HIDDEN)
        tensors[name + "self_attn.o_proj.weight"] = normal(HIDDEN, 32)
        tensors[name + "self_attn.q_norm.weight"] = 1 + normal(16, scale=0.1)
        tensors[name + "self_attn.k_norm.weight"] = 1 + normal(16, scale=0.1)
        tensors[name + "mlp.gate_proj.weight"] = normal(48, HIDDEN)
        tensors[name + "mlp.up_proj.weight"] = normal(48, HIDDEN)
        tensors[name + "mlp.down_proj.weight"] = normal(HIDDEN, 48)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
