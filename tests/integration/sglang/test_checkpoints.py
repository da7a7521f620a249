"""Checkpoints as users have them, on SGLang's own classes: the 27B's class with and without a tower, image
requests' positions in a tree, drafters whose window is short, targets in FP8."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from ddtree_engine.reference import pair_path
from ddtree_engine.sglang_plugin.errors import PluginError
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine import checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("kinds")
    return {kind: checkpoints.folder_of(kind, pair_path(), out) for kind in checkpoints.WRITERS}


def weights(folder):
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def conditional():
    from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_the_27bs_class_loads_the_pair_and_shows_the_drafter_what_it_needs(kind, folders, build_model):
    from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM

    model = build_model(conditional(), folders[kind] / "target")
    model.load_weights(weights(folders[kind] / "target"))
    parameters = dict(model.named_parameters())
    assert not [name for name, one in parameters.items() if one.isnan().any()]
    assert any("visual" in name for name in parameters) == (kind == "vision")
    assert model.is_mrope_enabled == (kind == "vision")

    plain = build_model(Qwen3_5ForCausalLM, pair_path() / "target")
    plain.load_weights(weights(pair_path() / "target"))
    for name, tensor in plain.named_parameters():
        assert torch.equal(parameters[name], tensor), name
    # What the worker and DFLASH take from a target.
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    captured = []
    for one in (model, plain):
        one.set_dflash_layers_to_capture([1, 2, 3, 5, 6])
        assert one.capture_aux_hidden_states
        captured.append([getattr(layer, "_is_layer_to_capture", False) for layer in one.model.layers])
    assert captured[0] == captured[1]
    assert sum(captured[0]) == 5


@pytest.mark.parametrize(("kind", "pictures"), [("text", False), ("vision", True)])
def test_both_configs_resolve_to_a_tree(kind, pictures, folders, resolved, configure):
    from sglang.srt.arg_groups.overrides import record_of
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish

    view = resolved(
        "--model-path", str(folders[kind] / "target"),
        "--speculative-draft-model-path", str(folders[kind] / "drafter"),
        "--speculative-num-draft-tokens", "32",
    )  # fmt: skip
    assert (view.speculative_num_draft_tokens, view.speculative_dflash_block_size) == (32, 16)
    assert not view.disable_overlap_schedule
    publish(record_of(view), role="tokenizer")
    config = ModelConfig.from_server_args(record_of(view))
    assert config.is_multimodal == config.model_is_mrope == pictures


def test_a_tree_behind_a_picture_has_the_requests_own_positions(published, monkeypatch):
    """SGLang numbers the tokens after a picture from less than their place; a node is as far behind."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    harness.patch_sglang(monkeypatch)
    make = ForwardBatch.init_new

    def init_new(batch, runner, *, spec_mrope_positions, **rest):
        forward_batch = make(batch, runner, **rest)
        assert spec_mrope_positions is None
        forward_batch.compute_spec_mrope_positions(runner, batch)
        return forward_batch

    monkeypatch.setattr(ForwardBatch, "init_new", staticmethod(init_new))
    width, offsets = 16, [0, -4, 0]
    rng = np.random.default_rng(0)
    logits = np.stack([harness.candidate_logits(rng, root) for root in harness.ROOTS])
    runner, recorded = harness.make_runner(monkeypatch, len(offsets))
    worker = harness.make_worker(runner, recorded, logits, width)
    batch = harness.make_batch(runner, width)
    batch.multimodal_inputs = [
        SimpleNamespace(mrope_position_delta=torch.tensor([[offset]])) if offset else None
        for offset in offsets
    ]
    with harness.configured(width):
        worker.forward_batch_generation(batch)
    seen = worker.target_worker.seen
    parents = harness.parents_from_mask(seen, width)
    expected = []
    for prefix, offset, tree in zip(harness.PREFIXES, offsets, parents, strict=True):
        depths = [0]
        for node in range(1, width):
            depths.append(depths[tree[node]] + 1)
        expected += [prefix + depth + offset for depth in depths]
    assert seen.mrope_positions.tolist() == [expected] * 3
    # The drafter knows places only, as it does in DFLASH.
    (drafted,) = recorded.drafted
    places = torch.tensor(harness.PREFIXES)[:, None] + torch.arange(harness.BLOCK)
    assert drafted.positions.tolist() == places.flatten().tolist()


def test_an_image_request_is_admitted(published):
    from ddtree_engine.sglang_plugin.config import parse_config
    from ddtree_engine.sglang_plugin.requests import refusal

    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=None),
        multimodal_inputs=SimpleNamespace(mrope_position_delta=torch.tensor([[-4]])),
    )
    assert refusal(request, parse_config("{}")) is None


def drafter_class():
    from sglang.srt.models.dflash import DFlashDraftModel

    return DFlashDraftModel


def test_a_drafters_window_is_its_configs_with_the_block_causal(folders, build_model):
    from sglang.srt.layers.radix_attention import AttentionType

    model = build_model(drafter_class(), folders["window"] / "drafter")
    model.load_weights(weights(folders["window"] / "drafter"))
    *sliding, full = [
        (layer.self_attn.attn.sliding_window_size, layer.self_attn.attn.attn_type) for layer in model.layers
    ]
    # SGLang counts the keys before a query.
    assert sliding == [(checkpoints.SHORT_WINDOW - 1, AttentionType.DECODER)] * 4
    assert full == (-1, AttentionType.ENCODER_ONLY)


@pytest.mark.parametrize("options", [(), ("--speculative-draft-model-quantization", "unquant")])
def test_an_fp8_target_resolves_and_says_what_its_drafter_is(options, resolved, configure):
    view = resolved("--speculative-num-draft-tokens", "32", "--quantization", "fp8", *options)
    assert view.quantization == "fp8"
    # Without a word the drafter is quantised with its target.
    assert view.speculative_draft_model_quantization == (None if options else "fp8")


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_resolves(kind, resolved, configure):
    assert resolved("--speculative-num-draft-tokens", "32", "--kv-cache-dtype", kind).kv_cache_dtype == kind


def test_a_cache_with_scales_of_blocks_is_refused(resolved, configure):
    with pytest.raises(PluginError, match=r"--kv-cache-dtype: found fp4_mx_block16, allowed .* fp8_e4m3"):
        resolved("--speculative-num-draft-tokens", "32", "--kv-cache-dtype", "fp4_mx_block16")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_caches_rows_are_moved_whole(dtype):
    from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

    rows = torch.randint(0, 256, (12, 2, 8), dtype=torch.uint8)
    keys, values = rows.clone(), rows.flip(0).clone()
    # Slots that are source and target at once.
    target, source = torch.tensor([3, 4, 5]), torch.tensor([4, 5, 9])
    move_kv_cache_native([keys], [values.view(dtype).view(torch.uint8)], target, source)
    assert torch.equal(keys[target], rows[source])
    assert torch.equal(values[target], rows.flip(0)[source])


def test_quantising_while_loading_leaves_the_recurrent_layers_parameters_as_they_are(build_model):
    """State `wy` reads a layer's convolution, A_log and dt_bias, and `tree` the head."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM

    folder = pair_path() / "target"
    model = build_model(
        Qwen3_5ForCausalLM, folder, options=("--quantization", "fp8"), quantization=Fp8Config()
    )
    model.load_weights(weights(folder))
    quantised = {
        name for name, one in model.named_modules()
        if type(getattr(one, "quant_method", None)).__name__ == "Fp8LinearMethod"
    }  # fmt: skip
    kinds = {name.split(".", 3)[-1] for name in quantised}
    assert {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"} <= kinds
    assert {"qkv_proj", "mlp.gate_up_proj"} <= kinds
    assert not {"linear_attn.conv1d", "lm_head"} & kinds
    before = dict(build_model(Qwen3_5ForCausalLM, folder).named_parameters())
    for name, one in model.named_parameters():
        # A cache's scales, which the checkpoint need not have.
        if not name.endswith((".k_scale", ".v_scale")):
            assert not one.isnan().any(), name
            assert name.rsplit(".", 1)[0] in quantised or one.dtype == before[name].dtype, name


def test_a_blocks_attention_in_a_window_is_what_the_cpu_engine_sees(plugin):
    """SGLang's kernel against the CPU engine's rows, behind prefixes shorter and longer than the window."""
    from ddtree_engine.reference.drafter import Drafter
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    window, block, heads, kv_heads, dim = 8, 4, 2, 1, 16
    rng = torch.Generator().manual_seed(0)

    def rows(count, width):
        return torch.randn(count, width, dim, generator=rng)

    for prefix in (3, 8, 21):
        q, k, v = rows(block, heads), rows(prefix + block, kv_heads), rows(prefix + block, kv_heads)
        # As SGLang's backend cuts it: the last `window - 1` slots, numbered from the first of them.
        kept = min(prefix, window - 1)
        out = torch.zeros(block, heads, dim)
        ints = torch.tensor
        extend_attention_fwd(
            q, k[prefix:].contiguous(), v[prefix:].contiguous(), out, k, v,
            ints([0, block]), ints([0, kept]), torch.arange(prefix - kept, prefix), None, True, None, block,
            1.0, 1.0, sliding_window_size=window - 1, window_kv_offsets=ints([prefix - kept]),
        )  # fmt: skip
        seer = SimpleNamespace(config=SimpleNamespace(window=window))
        first, bias = Drafter._visible(seer, True, True, prefix, block)
        scores = torch.einsum("qhd,kd->hqk", q, k[first:, 0]) / dim**0.5 + bias
        expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v[first:, 0])
        assert (out - expected).abs().max() < 1e-5, prefix
