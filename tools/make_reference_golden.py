"""Make the golden fixture of the CPU reference engine from Hugging Face transformers' own implementation.

    pip install torch==2.13.0 transformers==5.24.0
    python tools/make_reference_golden.py tests/unit/reference/golden

Writes a small random `Qwen3_5ForCausalLM` (config.json, model.safetensors) and expected.safetensors with a
prompt, its logits and the outputs of every layer, all in float32. The test that reads it needs neither
transformers nor this script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

SEED, PROMPT_LENGTH = 20, 150

CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attn_output_gate": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 80,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "mamba_ssm_dtype": "float32",
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def main(folder: Path) -> None:
    """Write the three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide enough that norms, gates and decays all matter.
            parameter.add_(torch.randn_like(parameter) * 0.2)
        prompt = torch.randint(0, CONFIG["vocab_size"], (PROMPT_LENGTH,))
        result = model(input_ids=prompt[None], output_hidden_states=True, use_cache=False)
    # The last entry of hidden_states is after the final norm; the ones before are the layers' outputs.
    layers = torch.stack([state[0] for state in result.hidden_states[1:-1]])
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    save_file(
        {"prompt": prompt, "logits": result.logits[0], "layers": layers}, folder / "expected.safetensors"
    )
    config = {"architectures": ["Qwen3_5ForCausalLM"], **CONFIG}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
