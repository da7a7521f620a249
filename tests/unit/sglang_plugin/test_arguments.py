"""Arguments without SGLang: what is refused, what is computed. SGLang's own resolution: integration tests."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ddtree_engine.sglang_plugin import arguments, memory
from ddtree_engine.sglang_plugin.arguments import Surroundings, resolve
from ddtree_engine.sglang_plugin.config import parse_config
from ddtree_engine.sglang_plugin.errors import ArgumentError
from safetensors.numpy import save_file

QWEN36_27B = {
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CARD_96 = 96 * memory.GIB
RULES = (*arguments.RULES, *arguments.TREE_RULES, *arguments.WY_RULES)


def view(**changed):
    fields = dict.fromkeys(rule.field for rule in RULES)
    fields |= {
        "device": "cuda",
        "speculative_draft_model_path": "drafter",
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_num_draft_tokens": 64,
        "speculative_dflash_block_size": None,
        "speculative_draft_attention_backend": None,
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "max_running_requests": None,
        "mamba_track_interval": 256,
        "disable_radix_cache": False,
        "mem_fraction_static": 0.85,
    }
    return SimpleNamespace(**{**fields, **changed})


def around(node_bytes=0, weight_bytes=0, card_bytes=0, draft_block=16):
    return Surroundings(draft_block, node_bytes, weight_bytes, card_bytes)


TREE = parse_config("{}")


def test_a_node_of_qwen36_27b_takes_147_mib_and_half_on_two_ranks():
    shape = memory.recurrent_shape(QWEN36_27B, state_bytes=4)
    assert shape.layers == 48
    assert shape.node_bytes / memory.MIB == pytest.approx(144 + 2.8125)
    assert memory.recurrent_shape(QWEN36_27B, state_bytes=4, tp=2).node_bytes * 2 == shape.node_bytes
    assert memory.recurrent_shape(QWEN36_27B, state_bytes=2).node_bytes / memory.MIB == pytest.approx(
        74.8, abs=0.1
    )


def test_a_hub_name_is_found_in_the_cache_and_an_unknown_one_is_not(tmp_path):
    snapshot = tmp_path / "models--org--target" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--target" / "refs").mkdir()
    (tmp_path / "models--org--target" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text('{"text_config": {"num_hidden_layers": 4}}')
    (snapshot / "model.safetensors").write_bytes(b"12345")
    folder = memory.checkpoint_folder("org/target", cache=str(tmp_path))
    assert memory.text_config_of(folder) == {"num_hidden_layers": 4}
    assert memory.weight_bytes(folder) == 5
    assert memory.checkpoint_folder("org/other", cache=str(tmp_path)) is None
    assert memory.checkpoint_folder("/no/such/folder", cache=str(tmp_path)) is None
    assert memory.checkpoint_folder(str(snapshot)) == snapshot


def write_checkpoint(folder, **config):
    save_file(
        {
            "model.embed_tokens.weight": np.zeros((8, 4), np.float16),
            "lm_head.weight": np.zeros((8, 4), np.float16),
            "model.layers.0.linear_attn.in_proj_qkv.weight": np.zeros((6, 4), np.float16),
            "model.layers.0.linear_attn.conv1d.weight": np.zeros((6, 1, 4), np.float16),
            "model.layers.0.linear_attn.A_log": np.zeros((3,), np.float32),
            "model.visual.blocks.0.attn.proj.weight": np.zeros((4, 4), np.float16),
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_quantised_while_loading_count_a_byte_for_what_fp8_shrinks(tmp_path):
    folder = write_checkpoint(tmp_path)
    assert memory.weight_bytes(folder, "fp8") == 2 * 32 * 2 + 24 + 24 * 2 + 3 * 4 + 16 * 2
    # As they are stored: not quantised, in a scheme nobody has looked at, or in FP8 already.
    stored = (folder / "model.safetensors").stat().st_size
    assert memory.weight_bytes(folder) == memory.weight_bytes(folder, "modelopt_fp4") == stored
    quantised = write_checkpoint(tmp_path, quantization_config={"quant_method": "fp8"})
    assert memory.weight_bytes(quantised, "fp8") == stored


def test_a_server_that_quantises_while_loading_has_room_for_more(tmp_path):
    paths = {
        "model_path": str(tmp_path / "target"),
        "speculative_draft_model_path": str(tmp_path / "drafter"),
    }
    for path in paths.values():
        Path(path).mkdir()
        write_checkpoint(Path(path))
    changed = {**paths, "tp_size": 1, "mamba_ssm_dtype": None, "speculative_draft_model_quantization": None}
    plain, fp8, both = (
        arguments.survey(
            view(**(changed | {"quantization": target, "speculative_draft_model_quantization": drafter})),
            TREE,
            CARD_96,
        ).weight_bytes
        for target, drafter in ((None, None), ("fp8", None), ("fp8", "fp8"))
    )
    assert plain - fp8 == fp8 - both > 0


def test_a_model_without_recurrent_layers_needs_no_states():
    assert memory.recurrent_shape({"num_hidden_layers": 4}, state_bytes=4) is None
    assert resolve(view(), TREE, around(card_bytes=CARD_96))["max_running_requests"] == 4


def test_heads_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(ArgumentError, match="--tp-size 5"):
        memory.recurrent_shape(QWEN36_27B, state_bytes=4, tp=5)


def test_the_largest_budget_that_fits_is_named():
    node = memory.recurrent_shape(QWEN36_27B, state_bytes=4).node_bytes
    surroundings = around(node, weight_bytes=54 * memory.GIB, card_bytes=CARD_96)
    with pytest.raises(ArgumentError) as caught:
        resolve(view(max_running_requests=8), TREE, surroundings)
    message = str(caught.value)
    assert "(8+1) x 64 nodes x 146.8 MiB = 82.6 GiB" in message
    assert "--speculative-num-draft-tokens 16 (budget 15) fits 8 requests" in message
    assert "--max-running-requests 1 fits width 64" in message
    assert resolve(view(max_running_requests=8, speculative_num_draft_tokens=16), TREE, surroundings)


def test_running_requests_follow_from_memory_when_not_given():
    node = memory.recurrent_shape(QWEN36_27B, state_bytes=4).node_bytes
    surroundings = around(node, weight_bytes=54 * memory.GIB, card_bytes=CARD_96)
    assert resolve(view(), TREE, surroundings)["max_running_requests"] == 1
    assert resolve(view(speculative_num_draft_tokens=16), TREE, surroundings)["max_running_requests"] == 4


def test_a_stash_takes_61_mib_for_64_nodes_and_says_so_where_it_does_not_fit():
    shape = memory.recurrent_shape(QWEN36_27B, state_bytes=4)
    assert 64 * shape.stash_bytes / memory.MIB == pytest.approx(60.6, abs=0.1)
    wy = parse_config('{"state": "wy"}')
    surroundings = around(shape.stash_bytes, weight_bytes=54 * memory.GIB, card_bytes=CARD_96)
    assert resolve(view(max_running_requests=8), wy, surroundings)["max_running_requests"] == 8
    with pytest.raises(ArgumentError, match=r"x 0\.9 MiB = .* GiB of stashed inputs") as caught:
        resolve(view(max_running_requests=800), wy, surroundings)
    assert "--mamba-ssm-dtype" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("enable_linear_replayssm", True, '--enable-linear-replayssm: found True, allowed .* "state": "wy"'),
        ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout: found True"),
        ("mamba_ssm_dtype", "float16", "--mamba-ssm-dtype: found float16, .* float32, bfloat16 or unset"),
    ],
)
def test_arguments_that_wy_cannot_serve_with_are_refused_and_pass_with_snapshots(field, value, said):
    with pytest.raises(ArgumentError, match=said):
        resolve(view(**{field: value}), parse_config('{"state": "wy"}'), around())
    resolve(view(**{field: value}), TREE, around())


def test_a_short_track_interval_is_refused_unless_nothing_is_tracked():
    with pytest.raises(ArgumentError, match="--mamba-track-interval: found 32, allowed is 64"):
        resolve(view(mamba_track_interval=32), TREE, around())
    resolve(view(mamba_track_interval=32, disable_radix_cache=True), TREE, around())


def test_budget_and_width_must_agree():
    config = parse_config('{"budget": 31}')
    with pytest.raises(ArgumentError, match="found 64, allowed is 32"):
        resolve(view(), config, around())
    assert (
        resolve(view(speculative_num_draft_tokens=None), config, around())["speculative_num_draft_tokens"]
        == 32
    )


def test_shadow_takes_the_drafters_block_only():
    config = parse_config('{"mode": "shadow"}')
    with pytest.raises(ArgumentError, match=r"found 64, allowed .* 16"):
        resolve(view(), config, around())
    fields = resolve(view(speculative_num_draft_tokens=None), config, around())
    assert (fields["speculative_num_draft_tokens"], fields["speculative_eagle_topk"]) == (16, 1)


def test_a_tree_smaller_than_the_block_still_counts_the_blocks_slots():
    fields = resolve(view(speculative_num_draft_tokens=8), TREE, around())
    assert fields["speculative_num_draft_tokens"] == 8
    assert fields["speculative_num_steps"] * fields["speculative_eagle_topk"] >= 16


@pytest.mark.parametrize("rule", [*arguments.RULES, *arguments.TREE_RULES], ids=lambda rule: rule.field)
def test_each_rule_names_its_option(rule):
    wrong = {"device": "cpu", "speculative_draft_model_path": None, "disaggregation_mode": "decode"}
    wrong |= dict.fromkeys(("speculative_accept_threshold_single", "speculative_accept_threshold_acc"), 0.9)
    wrong |= {"speculative_eagle_topk": 1}
    with pytest.raises(ArgumentError, match=f"^{rule.option}: found"):
        resolve(view(**{rule.field: wrong.get(rule.field, 2)}), TREE, around())
