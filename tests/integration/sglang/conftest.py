"""Tests against SGLang's real source, in `.venv-sglang` (tools/make_sglang_venv.py), without a GPU.

    .venv-sglang/bin/pytest tests/integration/sglang

In an environment without SGLang nothing here is collected.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
BLOCK = 16
TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000000,
    "max_position_embeddings": 4096,
    "vocab_size": 2048,
    "layer_types": ["full_attention", "full_attention"],
    "block_size": BLOCK,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 2047, "target_layer_ids": [0, 2]},
    "dtype": "bfloat16",
}

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(HERE))
    import stand_ins

    stand_ins.install()
    # Runs SGLang's own Triton kernels on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def plugin() -> str:
    """SGLang has loaded its plugins; the name under which ours is registered."""
    from ddtree_engine.sglang_plugin.names import ALGORITHM
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return ALGORITHM


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders with a config each and no weights."""
    folder = tmp_path_factory.mktemp("pair")
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {"target": folder / "target", "drafter": folder / "drafter"}


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch):
    """Set SGLANG_DDTREE_CONFIG for a test."""

    def set_config(**keys: object) -> None:
        monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(keys))

    monkeypatch.delenv("SGLANG_DDTREE_CONFIG", raising=False)
    return set_config


@pytest.fixture
def resolved(plugin: str, pair: dict[str, Path]):
    """Run SGLang's whole argument resolution on a command line; returns its resolved view."""

    def resolve(*options: str, algorithm: str | None = plugin):
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.server_args import prepare_server_args

        argv = ["--model-path", str(pair["target"]), "--skip-tokenizer-init", "--load-format", "dummy"]
        argv += ["--attention-backend", "triton", "--linear-attn-backend", "triton"]
        argv += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--device", "cuda"]
        if algorithm is not None:
            argv += ["--speculative-algorithm", algorithm]
            argv += ["--speculative-draft-model-path", str(pair["drafter"])]
        record = prepare_server_args([*argv, *options])
        record.resolve_once()
        record.check_server_args()
        return resolved_view(record)

    return resolve


@pytest.fixture
def published(resolved, configure):
    """Publish the configuration of a 64-node tree, as a server process does before it builds anything."""
    from sglang.srt.arg_groups.overrides import record_of
    from sglang.srt.runtime_context import publish

    view = resolved("--speculative-num-draft-tokens", "64")
    publish(record_of(view), role="tokenizer")
    return view


@pytest.fixture
def build_model(plugin, monkeypatch):
    """A model of a folder, with NaN in every parameter, as rank `rank` of `ranks`."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    stack = contextlib.ExitStack()

    def construct(kind, folder, rank=0, ranks=1, options=(), quantization=None):
        argv = ["--model-path", str(folder), "--skip-tokenizer-init", "--tp-size", str(ranks)]
        argv += ["--attention-backend", "triton", "--linear-attn-backend", "triton"]
        argv += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--device", "cuda"]
        record = prepare_server_args([*argv, *options])
        record.resolve_once()
        publish(record, role="tokenizer")
        config = ModelConfig.from_server_args(record).hf_config
        tensor_group = SimpleNamespace(world_size=ranks, rank_in_group=rank, cpu_group=None)
        alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
        stack.enter_context(
            get_parallel().override(
                tp_group=tensor_group,
                tp_rank=rank,
                moe_tp_group=tensor_group,
                attn_tp_group=tensor_group,
                attn_tp_rank=rank,
                pp_group=alone,
                pp_rank=0,
            )
        )
        model = kind(config, quantization)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return model

    with stack:
        yield construct
