"""DDTREE's arguments through SGLang's own resolution and checks."""

import json

import pytest
from conftest import BLOCK
from ddtree_engine.sglang_plugin.errors import PluginError

DFLASH_FIELDS = (
    "speculative_num_draft_tokens",
    "speculative_eagle_topk",
    "speculative_num_steps",
    "mamba_radix_cache_strategy",
    "disable_overlap_schedule",
    "page_size",
    "attention_backend",
    "linear_attn_backend",
    "chunked_prefill_size",
    "mem_fraction_static",
)


@pytest.mark.parametrize("width", [8, 16, 32, 64, 128])
def test_a_tree_of_every_width_resolves(width, resolved, configure):
    view = resolved("--speculative-num-draft-tokens", str(width))
    assert view.speculative_num_draft_tokens == width
    assert view.speculative_dflash_block_size == BLOCK
    assert view.speculative_eagle_topk > 1
    # What the scheduler expects a step to take covers the tree and the drafter's block.
    expected = max(view.speculative_num_steps * view.speculative_eagle_topk, width)
    assert expected >= max(BLOCK, width)
    assert view.max_running_requests == 4
    assert view.speculative_draft_attention_backend == "triton"
    assert not view.enable_mixed_chunk


def test_tree_serving_keeps_overlap_and_the_radix_cache(resolved, configure):
    view = resolved("--speculative-num-draft-tokens", "64")
    assert not view.disable_overlap_schedule
    assert view.mamba_radix_cache_strategy == "extra_buffer"


def test_the_budget_may_come_from_the_configuration(resolved, configure):
    configure(budget=31)
    assert resolved().speculative_num_draft_tokens == 32


def test_shadow_is_dflashs_configuration_to_the_last_field(resolved, configure):
    configure(mode="shadow", budget=63)
    shadow = resolved("--max-running-requests", "4")
    dflash = resolved(
        "--max-running-requests", "4", "--speculative-draft-attention-backend", "triton", algorithm="DFLASH"
    )
    for name in DFLASH_FIELDS:
        assert getattr(shadow, name) == getattr(dflash, name), name


def test_unsafe_takes_a_trees_arguments(resolved, configure):
    configure(mode="unsafe", allow_hybrid_unsafe=True)
    assert resolved("--speculative-num-draft-tokens", "16").speculative_eagle_topk > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--speculative-num-draft-tokens: missing"),
        (("--speculative-num-draft-tokens", "129"), "allowed is 2..128"),
        (("--speculative-num-draft-tokens", "1"), "allowed is 2..128"),
        (
            ("--speculative-num-draft-tokens", "16", "--speculative-eagle-topk", "1"),
            "--speculative-eagle-topk",
        ),
        (("--speculative-num-draft-tokens", "16", "--speculative-adaptive"), "--speculative-adaptive"),
        (("--speculative-num-draft-tokens", "16", "--attention-backend", "trtllm_mha"), "tree mask"),
        (
            ("--speculative-num-draft-tokens", "16", "--speculative-accept-threshold-single", "0.9"),
            "--speculative-accept-threshold-single",
        ),
        (
            ("--speculative-num-draft-tokens", "16", "--speculative-accept-threshold-acc", "0.9"),
            "--speculative-accept-threshold-acc",
        ),
        (
            ("--speculative-num-draft-tokens", "16", "--speculative-draft-window-size", "64"),
            "--speculative-draft-window-size",
        ),
        (("--speculative-num-draft-tokens", "16", "--pp-size", "2"), "--pp-size"),
        (("--speculative-num-draft-tokens", "16", "--enable-pdmux"), "--enable-pdmux"),
        (
            ("--speculative-num-draft-tokens", "16", "--enable-hierarchical-cache"),
            "--enable-hierarchical-cache",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message, resolved, configure):
    with pytest.raises(PluginError, match=message):
        resolved(*options)


def test_states_that_do_not_fit_are_refused_with_what_fits(resolved, configure):
    with pytest.raises(
        PluginError, match=r"MiB = .* GiB .*--speculative-num-draft-tokens \d+ \(budget \d+\)"
    ):
        resolved("--speculative-num-draft-tokens", "128", "--max-running-requests", "3000")


def test_bytes_per_node_are_what_sglang_allocates(pair, published):
    from ddtree_engine.sglang_plugin import memory
    from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig

    config = json.loads((pair["target"] / "config.json").read_text())
    params = Qwen3_5TextConfig(**config).mamba2_cache_params
    state = params.shape.temporal
    expected = state[0] * state[1] * state[2] * params.dtype.temporal.itemsize
    expected += sum(channels * taps * params.dtype.conv.itemsize for channels, taps in params.shape.conv)
    shape = memory.recurrent_shape(config, state_bytes=4)
    assert shape.layers == len(params.layers)
    assert shape.node_bytes == expected * len(params.layers)


def test_a_short_track_interval_is_refused(resolved, configure):
    # SGLang itself asserts this without naming a remedy; either refusal stops the server.
    with pytest.raises((PluginError, AssertionError)):
        resolved("--speculative-num-draft-tokens", "64", "--mamba-track-interval", "32")


def test_a_wrong_configuration_stops_the_server(resolved, configure):
    configure(mode="treee")
    with pytest.raises(PluginError, match=r"mode.*treee.*tree, shadow, unsafe"):
        resolved("--speculative-num-draft-tokens", "16")


def test_unsafe_without_its_switch_is_refused(resolved, configure):
    configure(mode="unsafe")
    with pytest.raises(PluginError, match="allow_hybrid_unsafe"):
        resolved("--speculative-num-draft-tokens", "16")


def test_a_release_that_differs_is_refused_when_the_algorithm_is_asked_for(resolved, configure, monkeypatch):
    from ddtree_engine.sglang_plugin import pin

    monkeypatch.setattr(pin, "mismatches", lambda: (pin.Mismatch("sglang.x:y", "source 1", "2"),))
    with pytest.raises(PluginError, match=r"sglang\.x:y"):
        resolved("--speculative-num-draft-tokens", "16")
    monkeypatch.setenv(pin.OVERRIDE, "1")
    assert resolved("--speculative-num-draft-tokens", "16").speculative_num_draft_tokens == 16
