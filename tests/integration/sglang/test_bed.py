"""Beds in SGLang's own modules: every parameter filled once, fused layouts and ranks as SGLang has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ddtree_engine.bed.folders import beds_of, write_folders
from ddtree_engine.bed.source import BedSource
from safetensors import safe_open

from tests.support.bed_pair import WIDE, WIDE_DRAFTER, write_bed_pair

# As the 27B's, these divide by two ranks, and the vocabulary by SGLang's padding.
EVEN = replace(WIDE, vocabulary=1792, q_heads=12, kv_heads=4, key_heads=4, value_heads=12)
EVEN_DRAFTER = replace(WIDE_DRAFTER, vocabulary=1792, q_heads=12, kv_heads=4)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_bed_pair(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def bed(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bed")
    write_folders(folder, small, beds_of(small, EVEN, EVEN_DRAFTER))
    return folder


def target_class():
    from ddtree_engine.bed.sglang_models.target import EntryClass

    return EntryClass


def drafter_class():
    from ddtree_engine.bed.sglang_models.drafter import EntryClass

    return EntryClass


def checkpoint(folder):
    """(name, tensor) of the weight files, the last names first: the order is not promised."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in sorted(file.keys(), reverse=True):
                yield name, file.get_tensor(name)


def wide(folder):
    source = BedSource.of_folder(folder)
    return {name: source.bed.tensor(name, source.read, source.filling) for name in source.bed.names()}


def entries(model):
    return sum(parameter.numel() for parameter in model.parameters())


def halves(tensors, rank, ranks, dim=0):
    return torch.cat([tensor.chunk(ranks, dim=dim)[rank] for tensor in tensors])


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_the_targets_parameters_are_the_wide_checkpoint_in_sglangs_layouts(bed, build_model, rank, ranks):
    model = build_model(target_class(), bed / "target", rank, ranks)
    names = {name for name, _ in model.named_parameters()}
    assert model.load_weights(checkpoint(bed / "target")) == names
    tensors, loaded = wide(bed / "target"), dict(model.named_parameters())
    assert not any(parameter.isnan().any() for parameter in loaded.values())
    if ranks == 1:
        assert entries(model) == sum(tensor.numel() for tensor in tensors.values())

    def same(name, *parts, dim=0):
        expected = halves([tensors[part] for part in parts], rank, ranks, dim)
        assert torch.equal(loaded[name].float(), expected), name

    for index, kind in enumerate(EVEN.layers):
        theirs = mine = f"model.layers.{index}."
        same(mine + "mlp.gate_up_proj.weight", theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        same(mine + "mlp.down_proj.weight", theirs + "mlp.down_proj.weight", dim=1)
        if kind == "full_attention":
            theirs += "self_attn."
            parts = [theirs + f"{part}_proj.weight" for part in "qkv"]
            same(mine + "qkv_proj.weight", *parts)
            same(mine + "o_proj.weight", theirs + "o_proj.weight", dim=1)
            continue
        theirs = mine = mine + "linear_attn."
        keys, values = EVEN.key_heads * EVEN.key_dim, EVEN.value_heads * EVEN.value_dim
        for name in ("in_proj_qkv.weight", "conv1d.weight"):
            for part, tensor in zip("qkv", tensors[theirs + name].split([keys, keys, values]), strict=True):
                tensors[f"{theirs}{name} {part}"] = tensor
        mixed = [f"{theirs}in_proj_qkv.weight {part}" for part in "qkv"]
        same(mine + "in_proj_qkvz.weight", *mixed, theirs + "in_proj_z.weight")
        same(mine + "in_proj_ba.weight", theirs + "in_proj_b.weight", theirs + "in_proj_a.weight")
        same(mine + "conv1d.weight", *(f"{theirs}conv1d.weight {part}" for part in "qkv"))
        same(mine + "A_log", theirs + "A_log")
        same(mine + "dt_bias", theirs + "dt_bias")
        same(mine + "out_proj.weight", theirs + "out_proj.weight", dim=1)
    same("model.embed_tokens.weight", "model.embed_tokens.weight")
    same("lm_head.weight", "lm_head.weight")


def test_norms_cache_what_was_loaded(bed, build_model):
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    model = build_model(target_class(), bed / "target")
    model.load_weights(checkpoint(bed / "target"))
    norms = [module for module in model.modules() if isinstance(module, GemmaRMSNorm)]
    assert len(norms) == 2 * len(EVEN.layers) + 2 * EVEN.layers.count("full_attention") + 1
    assert all(torch.equal(norm.gemma_weight, norm.weight + 1) for norm in norms)
    tensors = wide(bed / "target")
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    loaded = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if "norm" in name:
            assert torch.equal(loaded[name.replace(".self_attn", "")], tensor), name


def test_the_drafters_parameters_are_the_wide_checkpoint(bed, build_model):
    model = build_model(drafter_class(), bed / "drafter")
    model.load_weights(checkpoint(bed / "drafter"))
    tensors, loaded = wide(bed / "drafter"), dict(model.named_parameters())
    assert not any(parameter.isnan().any() for parameter in loaded.values())
    assert entries(model) == sum(tensor.numel() for tensor in tensors.values())
    for index in range(len(EVEN_DRAFTER.layers)):
        name = f"layers.{index}.self_attn."
        parts = torch.cat([tensors[f"{name}{part}_proj.weight"] for part in "qkv"])
        assert torch.equal(loaded[name + "qkv_proj.weight"], parts)
        parts = torch.cat([tensors[f"layers.{index}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(loaded[f"layers.{index}.mlp.gate_up_proj.weight"], parts)
    for name in tensors.keys() & loaded.keys():
        assert torch.equal(loaded[name], tensors[name]), name
    assert {"fc.weight", "norm.weight", "hidden_norm.weight"} <= loaded.keys()


def test_a_bed_is_embedded_before_a_server_quantises_it(bed, build_model):
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    fp8 = {"options": ("--quantization", "fp8"), "quantization": Fp8Config()}
    plain, quantised = (build_model(target_class(), bed / "target", **more) for more in ({}, fp8))
    for model in (plain, quantised):
        model.load_weights(checkpoint(bed / "target"))
    loaded = dict(quantised.named_parameters())
    for name, tensor in plain.named_parameters():
        assert torch.equal(loaded[name], tensor), name


def test_a_folder_that_is_no_bed_loads_as_ever(small, build_model):
    model = build_model(target_class(), small / "target")
    model.load_weights(checkpoint(small / "target"))
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(dict(model.named_parameters())[name], dict(checkpoint(small / "target"))[name])


def test_a_parameter_that_nothing_fills_is_an_error(bed, build_model, monkeypatch):
    from ddtree_engine.bed import embed

    monkeypatch.delitem(embed.LINEAR_LAYER, "linear_attn.A_log")
    model = build_model(target_class(), bed / "target")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.linear_attn\.A_log and 7 more"):
        model.load_weights(checkpoint(bed / "target"))


REGISTERED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import stand_ins
stand_ins.install()
from types import SimpleNamespace
import torch
torch.cuda.Stream = type("Stream", (), {"__init__": lambda *_, **__: None})
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import prepare_server_args

argv = ["--model-path", sys.argv[2] + "/target", "--skip-tokenizer-init", "--device", "cuda"]
argv += ["--attention-backend", "triton", "--linear-attn-backend", "triton"]
argv += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
argv += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", sys.argv[2] + "/drafter"]
argv += ["--speculative-draft-attention-backend", "triton"]
record = prepare_server_args(argv)
record.resolve_once()
record.check_server_args()
publish(record, role="tokenizer")
alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
groups = dict(tp_group=alone, attn_tp_group=alone, pp_group=alone, tp_rank=0, attn_tp_rank=0, pp_rank=0)
found = {}
for name in ("target", "drafter"):
    config = ModelConfig(model_path=sys.argv[2] + "/" + name, is_draft_model=name == "drafter").hf_config
    kind, _ = ModelRegistry.resolve_model_cls(config.architectures)
    with get_parallel().override(**groups), torch.device("meta"):
        model = kind(config)
    found[name] = [kind.__module__, sum(p.numel() for p in model.parameters())]
print(json.dumps(found))
"""


@pytest.mark.timeout(900)  # imports SGLang in a process of its own
def test_the_package_is_registered_and_the_27bs_modules_have_the_beds_size(tmp_path):
    from ddtree_engine.bed.__main__ import main

    assert main([str(tmp_path)]) == 0
    environment = dict(os.environ, SGLANG_EXTERNAL_MODEL_PACKAGE="ddtree_engine.bed.sglang_models")
    answer = subprocess.run(
        [sys.executable, "-c", REGISTERED, str(Path(__file__).parent), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["target"] == ["ddtree_engine.bed.sglang_models.target", 26_895_998_464]
    assert found["drafter"] == ["ddtree_engine.bed.sglang_models.drafter", 1_730_213_120]
