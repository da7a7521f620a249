"""Wrong checkpoints are refused by file, tensor or key, with what was found and what is allowed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from ddtree_engine.reference.checkpoint import fingerprint
from ddtree_engine.reference.config import read_target_config
from ddtree_engine.reference.drafter import Drafter
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.errors import InputError
from ddtree_engine.reference.target import Target
from safetensors.torch import load_file, save_file

from tests.support.tiny_pair import write_pair

from .conftest import generate, random_prompt

LAYER = "model.language_model.layers.0."


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "pair")


def edit_config(folder, *path, value):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    at = config
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    file.write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load_target(pair):
    return Target.load(pair / "target", torch.float32, 64)


def load_drafter(pair):
    return Drafter.load(pair / "drafter", read_target_config(pair / "target"), torch.float32, 64)


def refused(load, pair, *words):
    with pytest.raises(InputError) as caught:
        load(pair)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("architectures",), ["LlamaForCausalLM"]),
        (("hidden_size",), KeyError),
        (("hidden_size",), "32"),
        (("num_attention_heads",), 0),
        (("num_key_value_heads",), 3),
        (("linear_num_value_heads",), 3),
        (("layer_types",), ["linear_attention"] * 3),
        (("layer_types",), ["linear_attention"] * 3 + ["mamba"]),
        (("hidden_act",), "gelu"),
        (("attn_output_gate",), False),
        (("attention_bias",), True),
        (("rope_parameters",), KeyError),
        (("rope_parameters", "rope_type"), "yarn"),
        (("rope_parameters", "rope_theta"), -1),
        (("rope_parameters", "partial_rotary_factor"), 0.2),
        (("rope_parameters", "mrope_section"), [2, 2, 2]),
        (("eos_token_id",), "end"),
        (("max_position_embeddings",), None),
    ],
)
def test_a_wrong_target_key_is_named(copy, path, value):
    edit_config(copy / "target", *path, value=value)
    refused(load_target, copy, "target/config.json", path[-1], "found", "allowed")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("architectures",), ["DFlash2DraftModel"]),
        (("hidden_size",), 64),
        (("num_target_layers",), 8),
        (("vocab_size",), 100),
        (("block_size",), 1),
        (("sliding_window",), KeyError),
        (("layer_types",), ["full_attention", "chunked_attention", "full_attention"]),
        (("rope_scaling",), {"type": "yarn"}),
        (("dflash_config",), KeyError),
        (("dflash_config", "mask_token_id"), 1000),
        (("dflash_config", "target_layer_ids"), [0, 9, 1]),
        (("dflash_config", "target_layer_ids"), []),
        (("dflash_config", "selector_rank"), 8),
        (("dflash_config", "projector_type"), "domino"),
    ],
)
def test_a_wrong_drafter_key_is_named(copy, path, value):
    edit_config(copy / "drafter", *path, value=value)
    refused(load_drafter, copy, "drafter/config.json", path[-1], "found", "allowed")


def test_a_missing_tensor_is_named(copy):
    edit_tensors(copy / "target", lambda t: t.pop(LAYER + "linear_attn.A_log"))
    refused(load_target, copy, LAYER + "linear_attn.A_log", "missing")


def test_a_wrong_shape_is_named(copy):
    edit_tensors(copy / "drafter", lambda t: t.update({"fc.weight": torch.zeros(32, 64)}))
    refused(load_drafter, copy, "drafter/model.safetensors", "fc.weight", "[32, 64]", "[32, 96]")


def test_a_wrong_dtype_is_named(copy):
    edit_tensors(copy / "drafter", lambda t: t.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}))
    refused(load_drafter, copy, "norm.weight", "int8", "bfloat16")


def test_a_tensor_that_nothing_asks_for_is_named(copy):
    edit_tensors(copy / "target", lambda t: t.update({LAYER + "self_attn.sinks": torch.zeros(2)}))
    refused(load_target, copy, LAYER + "self_attn.sinks")


def test_nan_in_a_tensor_is_refused(copy):
    edit_tensors(copy / "target", lambda t: t["lm_head.weight"][0, :1].fill_(torch.nan))
    refused(load_target, copy, "lm_head.weight", "NaN")


def test_vision_and_mtp_tensors_are_ignored(copy):
    extra = {"model.visual.patch.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    edit_tensors(copy / "target", lambda t: t.update(extra))
    load_target(copy)


@pytest.mark.parametrize("cut", [0, 4, 100, 5000])
def test_a_truncated_weight_file_is_named(copy, cut):
    file = copy / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    refused(load_target, copy, "target/model.safetensors", "safetensors")


def test_a_config_that_is_no_json_is_named(copy):
    (copy / "target" / "config.json").write_text("{")
    refused(load_target, copy, "target/config.json", "JSON")


def test_missing_folders_and_files_are_named(tiny, tmp_path, copy):
    refused(load_target, tmp_path / "none", "config.json", "cannot be read")
    (copy / "target" / "model.safetensors").unlink()
    refused(load_target, copy, "model.safetensors")


def test_an_index_must_stay_in_its_folder(copy):
    shutil.copy(copy / "target" / "model.safetensors", copy / "secret.safetensors")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (copy / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(load_target, copy, "weight_map", "../secret.safetensors")


def test_sharded_bare_prefixed_and_nested_checkpoints_load_the_same(tiny, copy, tmp_path):
    """Two files with an index, `model.` names and a `text_config`, as the real model has them."""
    target = copy / "target"
    tensors = load_file(target / "model.safetensors")
    renamed = {name.replace("model.language_model.", "model."): value for name, value in tensors.items()}
    names = sorted(renamed)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: renamed[name] for name in own}, target / file)
    (target / "model.safetensors").unlink()
    weight_map = {name: file for file, own in shards.items() for name in own}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((target / "config.json").read_text())
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (target / "config.json").write_text(json.dumps(nested))
    prompt = random_prompt(20)
    outputs = [
        generate(Engine.load(Arm.AR, pair / "target", None, context_length=64), prompt, 10)[0]
        for pair in (tiny, copy)
    ]
    assert outputs[0] == outputs[1]


def test_a_tied_head_is_the_embedding(tmp_path):
    pair = write_pair(tmp_path, tied=True)
    target = load_target(pair)
    assert torch.equal(target.head.t(), target.embedding)
    outputs = [
        generate(
            Engine.load(Arm(arm), pair / "target", pair / "drafter", context_length=128),
            random_prompt(20),
            20,
            budget=15,
        )[0]
        for arm in ("ar", "ddtree")
    ]
    assert outputs[0] == outputs[1]


def test_eos_ids_come_from_all_three_places(copy):
    (copy / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_target_config(copy / "target").eos_token_ids == (2, 7, 9)


def test_the_fingerprint_changes_with_weights_and_config(copy):
    before = fingerprint(copy / "target")
    edit_config(copy / "target", "rms_norm_eps", value=1e-5)
    middle = fingerprint(copy / "target")
    edit_tensors(copy / "target", lambda t: t["lm_head.weight"].add_(1))
    assert len({before, middle, fingerprint(copy / "target")}) == 3
