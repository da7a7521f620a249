"""The worker's construction and start-up through DFLASH's own constructor, with stand-in runners."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from ddtree_engine.sglang_plugin.draft_sampler import ShadowDraftSampler, TreeDraftSampler
from ddtree_engine.sglang_plugin.errors import ArgumentError
from harness import BLOCK

HIDDEN, VOCABULARY = 32, 2048


class Drafter(torch.nn.Module):
    candidate_selector = None
    lilicorr = None
    block_size = BLOCK

    def __init__(self):
        super().__init__()
        self.layers = []
        self.config = SimpleNamespace(hidden_size=HIDDEN)

    def set_block_size(self, block):
        self.block = block


class Target(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)

    def get_input_embeddings(self):
        return self.embed


@pytest.fixture
def build(plugin, pair, resolved, configure, monkeypatch):
    """Construct a worker for a configuration; returns it and what its parts have seen."""
    from sglang.srt.arg_groups.overrides import record_of
    from sglang.srt.runtime_context import get_parallel, get_spec, publish
    from sglang.srt.speculative import dflash_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    stack = contextlib.ExitStack()

    def construct(config, *options, drafter=None, windows=None, topk=2):
        configure(**config)
        record = record_of(resolved(*options))
        publish(record, role="tokenizer")
        group = SimpleNamespace(world_size=1, rank_in_group=0)
        stack.enter_context(get_parallel().override(tp_group=group, tp_rank=0))
        seen = SimpleNamespace(widths={})

        def note(stage):
            spec = get_spec()
            seen.widths[stage] = (spec.speculative_num_draft_tokens, spec.speculative_eagle_topk)

        draft_config = json.loads((pair["drafter"] / "config.json").read_text())
        draft_runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**{**draft_config, **(drafter or {})})),
            capture_tail_hooks=[],
            attn_backend="draft",
        )
        draft_model = Drafter()
        draft_worker = SimpleNamespace(
            init_attention_backends=lambda: note("attention"),
            init_cuda_graphs=lambda capture_decode_cuda_graph: note("graphs"),
        )

        def build_draft(**_):
            note("weights")
            return SimpleNamespace(
                draft_worker=draft_worker,
                draft_model_runner=draft_runner,
                draft_model=draft_model,
                resolved_attention_backend="triton",
            )

        for name, value in {
            "build_draft_tp_worker": build_draft,
            "SpecTpSync": lambda group: SimpleNamespace(available_memory_gb=lambda *_, **__: 100.0),
            "get_dp_tp_group": lambda: None,
            "resolve_draft_parallel_layout": lambda *_, **__: None,
            "model_draft_parallel_spec": lambda *_, **__: None,
            "draft_tp_context": lambda layout: contextlib.nullcontext(),
            "draft_pp_context": contextlib.nullcontext,
        }.items():
            monkeypatch.setattr(dflash_worker_v2, name, value)
        monkeypatch.setattr(dflash_worker_v2.DFlashWorkerV2, "_init_fused_kv_helper", lambda self: None)
        monkeypatch.setattr(dflash_worker_v2.DFlashWorkerV2, "_cache_full_embed_weight", lambda self: None)
        linear = SimpleNamespace(topk=topk, forward_metadata=None)
        window = torch.zeros(2, 3, 4) if windows is None else windows
        pool = SimpleNamespace(
            mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(intermediate_conv_window=[window]))
        )
        runner = SimpleNamespace(
            model=Target(),
            model_config=SimpleNamespace(vocab_size=VOCABULARY, hf_config=SimpleNamespace()),
            spec_aux_config=SimpleNamespace(draft_model_config=None),
            spec_algorithm=SpeculativeAlgorithm.from_string(plugin),
            attn_backend=SimpleNamespace(linear_attn_backend=linear),
            req_to_token_pool=pool,
            max_running_requests=4,
            tokenizer=None,
        )
        monkeypatch.setattr(dflash_worker_v2, "mambaish_config", lambda config: object())
        target = SimpleNamespace(model_runner=runner, device="cpu", tokenizer=None)
        algorithm = SpeculativeAlgorithm.from_string(plugin)
        worker_class = algorithm.create_worker(record)
        worker = worker_class(server_args=record, gpu_id=0, nccl_port=0, target_worker=target)
        return worker, seen

    with stack:
        yield construct


TREE = ({"mode": "tree", "topk": 4}, "--speculative-num-draft-tokens", "64")


def test_drafter_parts_are_built_for_the_block_and_the_server_keeps_the_tree(build):
    from sglang.srt.runtime_context import get_spec

    worker, seen = build(*TREE)
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    assert seen.widths == dict.fromkeys(("weights", "attention", "graphs"), (16, 1))
    spec = get_spec()
    assert (spec.speculative_num_draft_tokens, spec.speculative_eagle_topk) == (64, 2)
    assert (worker.block_size, worker.verify_width, worker.depth) == (16, 64, 16)
    assert worker.speculative_num_draft_tokens == 64
    assert worker._target_logits_processor is None
    assert isinstance(worker._draft_sampler, TreeDraftSampler)
    assert len(worker.draft_model_runner.capture_tail_hooks) == 1


def test_the_capture_hook_fills_candidates_and_trees(build):
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    worker, _ = build(*TREE)
    worker.init_cuda_graphs()
    (hook,) = worker.draft_model_runner.capture_tail_hooks
    hidden = torch.randn(2 * 16, HIDDEN)
    inputs = SimpleNamespace(input_ids=torch.arange(32))
    with torch.no_grad():
        hook(None, LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden), inputs, 32)
    trees = worker._tree_sampler.trees(2)
    assert trees.tokens[:, 0].tolist() == [0, 16]
    assert trees.parents.shape == (2, 64)
    logits = hidden.view(2, 16, -1)[:, 1:] @ worker.model_runner.model.lm_head.weight.T
    assert worker._tree_sampler.ids[:2, :, 0].tolist() == logits.argmax(-1).tolist()


def test_kv_is_moved_by_the_way_that_reads_before_it_writes(build, monkeypatch):
    from sglang.srt.environ import envs

    monkeypatch.delenv("SGLANG_NATIVE_MOVE_KV_CACHE", raising=False)
    build({"mode": "shadow"})
    assert not envs.SGLANG_NATIVE_MOVE_KV_CACHE.get()
    build(*TREE)
    assert envs.SGLANG_NATIVE_MOVE_KV_CACHE.get()
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "0")
    build(*TREE)
    assert not envs.SGLANG_NATIVE_MOVE_KV_CACHE.get()


def test_shadow_keeps_dflashs_sampler_and_its_width(build):
    worker, seen = build({"mode": "shadow", "budget": 31})
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    assert seen.widths["graphs"] == (16, 1)
    assert isinstance(worker._draft_sampler, ShadowDraftSampler)
    assert type(worker._draft_sampler.stock).__name__ == "_DflashDraftSampler"
    assert worker._draft_sampler.out.data_ptr() == worker._draft_sampler.stock.out.data_ptr()
    assert worker._tree_sampler.builder.width == 32
    assert worker.describe()["arm"] == "shadow"
    assert worker.describe()["shadow_steps"] == 0


def test_unsafe_takes_the_tree_from_the_recurrent_layers_only(build):
    worker, _ = build({"mode": "unsafe", "allow_hybrid_unsafe": True}, "--speculative-num-draft-tokens", "16")
    worker.init_attention_backends()
    assert worker.model_runner.attn_backend.linear_attn_backend.topk == 1
    safe, _ = build(*TREE)
    safe.init_attention_backends()
    assert safe.model_runner.attn_backend.linear_attn_backend.topk == 2


def test_a_topk_that_was_lost_on_the_way_stops_the_server(build):
    worker, _ = build(*TREE, topk=1)
    with pytest.raises(ArgumentError, match="found topk 1"):
        worker.init_attention_backends()


def test_shared_convolution_windows_stop_the_server(build):
    shared = torch.zeros(10).as_strided((4, 3), (1, 1))
    worker, _ = build(*TREE, windows=shared)
    with pytest.raises(ArgumentError, match="shared convolution windows"):
        worker.init_attention_backends()


@pytest.mark.parametrize("scaling", [{"output_multiplier": 0.5}, {"final_logit_softcapping": 30.0}])
def test_drafters_whose_scores_are_no_log_probabilities_are_refused(scaling, build):
    dflash_config = {"mask_token_id": 2047, "target_layer_ids": [0, 2], **scaling}
    with pytest.raises(ArgumentError, match="rescales its logits"):
        build(*TREE, drafter={"dflash_config": dflash_config})


def test_a_quantised_head_is_refused(build):
    worker, _ = build(*TREE)
    head = SimpleNamespace(weight=torch.zeros(4, 4, dtype=torch.int8))
    worker.model_runner.model = SimpleNamespace(lm_head=head)
    with pytest.raises(ArgumentError, match="lm_head"):
        worker._new_tree_sampler()


def test_results_on_the_host_reach_the_counters_and_the_description(build):
    worker, _ = build(*TREE)
    worker.on_verify_complete_cpu([1, 2], batch_size=2)
    worker.note_request_finished(rid="x", natural_stop=True)
    described = worker.describe()
    assert (described["mode"], described["budget"], described["block"]) == ("tree", 63, 16)
    assert described["requests"] == 0
    json.dumps(described)


def test_a_prefill_hands_over_a_trees_input_and_shadow_dflashs_own(build):
    from ddtree_engine.sglang_plugin.inputs import DDTreeDraftInput
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    handed = {"bonus_tokens": torch.tensor([1, 2]), "seq_lens": torch.tensor([7, 9])}
    worker, _ = build(*TREE)
    ours = worker._make_next_draft_input_prefill(**handed)
    assert type(ours) is DDTreeDraftInput
    assert (ours.bonus_tokens.tolist(), ours.new_seq_lens.tolist()) == ([1, 2], [7, 9])
    assert ours.hidden_states.shape == ours.topk_p.shape == (2, 0)
    shadow, _ = build({"mode": "shadow"})
    assert type(shadow._make_next_draft_input_prefill(**handed)) is DFlashDraftInputV2


@pytest.mark.parametrize(("width", "reserved"), [(64, 64), (8, 16)])
def test_a_step_reserves_for_the_wider_of_tree_and_block(width, reserved, build, monkeypatch):
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    worker, _ = build({"mode": "tree"}, "--speculative-num-draft-tokens", str(width))
    seen = []
    monkeypatch.setattr(
        DFlashDraftInputV2,
        "prepare_for_decode",
        lambda self, batch: seen.append(get_spec().speculative_num_draft_tokens),
    )
    handed = {"bonus_tokens": torch.tensor([1]), "seq_lens": torch.tensor([7])}
    worker._make_next_draft_input_prefill(**handed).prepare_for_decode(None)
    assert seen == [reserved]
    assert get_spec().speculative_num_draft_tokens == width


WIDTHS = [16, 32, 64]


@pytest.fixture
def several(build):
    """A worker of several widths whose target gives out attention backends with this topk."""

    def construct(topk=2):
        worker, seen = build({"mode": "tree", "topk": 4, "widths": WIDTHS})
        runner = worker.model_runner

        def backend(init_new_workspace):
            return SimpleNamespace(linear_attn_backend=SimpleNamespace(topk=topk))

        runner._get_attention_backend = backend
        runner.init_new_workspace, runner.eager_runner, runner.decode_cuda_graph_runner = False, None, None
        runner.kv_index_translator = SimpleNamespace(bind_and_verify_backends=lambda backends: None)
        runner.prewarm_sampling = lambda: "warm"
        return worker, seen

    return construct


def test_every_width_gets_a_backend_and_the_drafter_stays_one(several):
    worker, seen = several()
    worker.init_attention_backends()
    widest = worker.model_runner.attn_backend
    worker.init_cuda_graphs()
    assert seen.widths == dict.fromkeys(("weights", "attention", "graphs"), (16, 1))
    assert list(worker.widths._captured) == [16, 32]
    backends = {id(one.backend) for one in worker.widths._captured.values()} | {id(widest)}
    assert len(backends) == 3
    assert worker.model_runner.attn_backend is widest
    assert worker._tree_sampler.builder.width == 64


def test_a_topk_that_a_narrow_width_lost_stops_the_server(several):
    worker, _ = several(topk=1)
    with pytest.raises(ArgumentError, match="found topk 1"):
        worker.init_cuda_graphs()


def test_every_width_is_checked_before_the_first_request(several, monkeypatch):
    from ddtree_engine.sglang_plugin import worker as worker_module
    from sglang.srt.runtime_context import get_spec

    worker, _ = several()
    worker.init_cuda_graphs()
    checked, warmed = [], []

    def check(one, trees):
        assert get_spec().speculative_num_draft_tokens == one.verify_width
        checked.append((one.verify_width, one.depth, trees))
        return {"nodes": one.verify_width}

    monkeypatch.setattr(worker_module.self_check, "run", check)
    monkeypatch.setattr(worker_module.wy, "warm_up", lambda runner, depth, most: warmed.append((depth, most)))
    assert worker.prewarm_sampling() == "warm"
    assert checked == [(64, 16, 2), (16, 16, 2), (32, 16, 2)]
    assert warmed == [(16, 4)] * 3
    narrower = {"16": {"nodes": 16}, "32": {"nodes": 32}}
    assert worker.self_check_report == {"nodes": 64, "narrower": narrower}
    assert worker.verify_width == 64


def test_what_several_widths_did_is_described(several):
    worker, _ = several()
    worker.on_verify_complete_cpu([1, 2], batch_size=2)
    described = worker.describe()
    assert (described["width"], described["widths"], described["budgets"]) == (64, WIDTHS, [15, 31, 63])
    assert described["by_width"]["16"] == {
        "steps": 0,
        "requests": 0,
        "sampled_steps": 0,
        "stage_seconds": {},
    }
    json.dumps(described)


def test_one_width_is_served_without_any_of_it(build):
    worker, _ = build(*TREE)
    assert worker.widths is None
    assert worker.chooser is None
    assert not {"widths", "budgets", "by_width", "last_width"} & worker.describe().keys()
