"""A worker of the plugin with stand-in models, on SGLang's real verify code.

The two models compute: the drafter proposes what a table says, the target's next token is a function of the
whole path. SGLang's tree kernels run as Triton in the interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from ddtree_engine.sglang_plugin import hooks
from ddtree_engine.sglang_plugin.config import parse_config
from ddtree_engine.sglang_plugin.draft_sampler import Head, TreeDraftSampler
from ddtree_engine.sglang_plugin.metrics import StageTimes, StepCounters
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder
from ddtree_engine.tree import accept
from ddtree_engine.tree.build import Builder

VOCABULARY = 64
BLOCK = 8
TOPK = 4
PREFIXES = [5, 17, 9]
ROOTS = [3, 60, 11]


def next_token(path):
    """The target's greedy choice after a path of tokens."""
    return (sum((place + 3) * token for place, token in enumerate(path)) * 7 + 1) % VOCABULARY


def candidate_logits(rng, root):
    """Drafter logits [F-1, V] whose best candidates often, not always, hold the target's tokens."""
    path, rows = [root], []
    for _ in range(BLOCK - 1):
        truth = next_token(path)
        row = rng.normal(0, 1, VOCABULARY)
        row[truth] += rng.choice([6.0, 3.0, 0.0], p=[0.5, 0.35, 0.15])
        rows.append(row)
        path.append(truth)
    return np.stack(rows).astype(np.float32)


class Target:
    """Runs a verify batch: logits from paths, hidden states that name their row."""

    def __init__(self, runner):
        self.model_runner = runner

    def forward_batch_generation(self, batch, forward_batch, is_verify, **_):
        assert is_verify
        verify = forward_batch.spec_info
        width = verify.draft_token_num
        tokens = forward_batch.input_ids.view(-1, width)
        logits = torch.zeros(tokens.numel(), VOCABULARY)
        parents = parents_from_mask(forward_batch, width)
        for request, row in enumerate(tokens.tolist()):
            for node in range(width):
                path, at = [], node
                while at >= 0:
                    path.append(row[at])
                    at = parents[request][at]
                logits[request * width + node, next_token(path[::-1])] = 10.0
        self.seen = forward_batch
        hidden = torch.arange(tokens.numel(), dtype=torch.float32)[:, None].repeat(1, 2)
        output = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        return SimpleNamespace(
            logits_output=output,
            can_run_cuda_graph=False,
            routed_experts_output=None,
            indexer_topk_output=None,
        )


def parents_from_mask(forward_batch, width):
    """A node's parent is its deepest ancestor in the mask that the attention layers read."""
    mask = forward_batch.spec_info.custom_mask.bool()
    parents, start = [], 0
    for length in forward_batch.seq_lens.tolist():
        size = width * (length + width)
        rows = mask[start : start + size].view(width, length + width)
        assert rows[:, :length].all()
        inside = rows[:, length:]
        depth = inside.sum(1)
        found = [-1]
        assert inside[:, 0].all()
        for node in range(1, width):
            above = [other for other in range(width) if inside[node, other] and other != node]
            found.append(max(above, key=lambda other: int(depth[other])))
        parents.append(found)
        start += size
    return parents


def patch_sglang(monkeypatch):
    """Take SGLang's tree kernels in Triton, and leave out what belongs to a real model runner."""
    from ddtree_engine.sglang_plugin import worker as worker_module
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative import eagle_utils, eagle_worker_common, spec_utils

    hooks.install()
    monkeypatch.setattr(spec_tree, "_is_cuda", False)
    monkeypatch.setattr(spec_tree, "_is_xpu", True)  # the Triton tree kernels
    stock = spec_tree.sgl_build_tree_kernel_triton

    def to_the_root(*arguments):
        # The CUDA kernel walks to the root and uses `depth` for a stride only; this one stops after `depth`.
        stock(*arguments[:9], arguments[10], *arguments[10:])

    monkeypatch.setattr(spec_tree, "sgl_build_tree_kernel_triton", to_the_root)
    monkeypatch.setattr(eagle_utils, "_PREPARE_FOR_VERIFY_DEPS", None)
    monkeypatch.setattr(spec_utils, "prepare_mamba_track_for_verify", lambda batch: None)
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda config: object())
    monkeypatch.setattr(eagle_utils, "maybe_build_dsv4_verify_bundle", lambda *_: None)
    monkeypatch.setattr(worker_module, "draft_tp_context", lambda layout: torch.no_grad())
    monkeypatch.setattr(worker_module, "enable_num_token_non_padded", lambda: False)
    monkeypatch.setattr(eagle_worker_common, "maybe_detect_nan", lambda *_: None)
    monkeypatch.setattr(eagle_worker_common, "maybe_detect_inf", lambda *_: None)

    def init_new(batch, runner, *, kv_loc_plan, capture_hidden_mode, **_):
        forward_batch = ForwardBatch(
            forward_mode=batch.forward_mode,
            batch_size=len(batch.seq_lens),
            input_ids=batch.input_ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=batch.spec_info.positions,
            spec_info=batch.spec_info,
            capture_hidden_mode=capture_hidden_mode,
        )
        kv_loc_plan.bind(forward_batch, runner.kv_index_translator)
        return forward_batch

    monkeypatch.setattr(ForwardBatch, "init_new", staticmethod(init_new))


def make_runner(monkeypatch, requests, columns=128):
    """A model runner with a request table, slots that are what the table says, and recorders."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    table = torch.arange((requests + 1) * columns, dtype=torch.int32).view(requests + 1, columns)
    recorded = SimpleNamespace(moved=[], committed=[], injected=[], published=[], drafted=[], table=table)
    cache = SimpleNamespace(move_kv_cache=lambda target, source: recorded.moved.append((target, source)))
    embedding = torch.nn.Embedding(VOCABULARY, 8)
    runner = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
        model_config=SimpleNamespace(vocab_size=VOCABULARY, model_is_mrope=False, quantization=None),
        model=SimpleNamespace(get_input_embeddings=lambda: embedding),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache),
        decode_cuda_graph_runner=None,
        max_running_requests=requests,
        max_total_num_tokens=4096,
        watermark_state=None,
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        page_size=1,
        attn_backend=SimpleNamespace(
            verify_mask=None,
            max_context_len=columns,
            update_mamba_state_after_mtp_verify=lambda **steps: recorded.committed.append(steps),
        ),
    )
    translator = KVIndexTranslator.__new__(KVIndexTranslator)
    pass_through = SimpleNamespace(key="all", write=None, read_v2p=None)
    monkeypatch.setattr(KVIndexTranslator, "space", lambda self, kind: pass_through)
    monkeypatch.setattr(KVIndexTranslator, "reads_are_translated", False)
    translator.req_to_token = table
    translator.page_size = 1
    runner.kv_index_translator = translator
    return runner, recorded


def make_worker(runner, recorded, logits, width, builder=Builder.BEST_FIRST, topk=TOPK):
    """A `DDTreeWorkerV2` around a runner, without the weights that its constructor loads."""
    from ddtree_engine.sglang_plugin.worker import DDTreeWorkerV2

    requests = len(logits)

    def draft(forward_batch):
        recorded.drafted.append(forward_batch)
        hidden = torch.zeros(requests, BLOCK, VOCABULARY)
        hidden[:, 1:] = torch.from_numpy(logits)
        output = SimpleNamespace(hidden_states=hidden.view(-1, VOCABULARY))
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    worker = DDTreeWorkerV2.__new__(DDTreeWorkerV2)
    worker.config = parse_config(f'{{"topk": {topk}, "builder": "{builder}"}}')
    worker.block_width, worker.verify_width, worker.device = BLOCK, width, "cpu"
    worker.model_runner = runner
    worker._target_worker = Target(runner)
    worker.draft_model_runner = SimpleNamespace(forward=draft, kv_index_translator=runner.kv_index_translator)
    worker.draft_parallel_layout = worker._draft_sampler = worker._draft_block_spec_info = None
    worker._mask_token_id, worker._noise_embed_scale = VOCABULARY - 1, 1.0
    worker._block_ids = worker._positions = worker.widths = worker.chooser = worker._output_counts = None
    tree_builder = TreeBuilder(BLOCK, topk, width - 1, builder, None, "cpu")
    worker._tree_sampler = TreeDraftSampler(
        Head(torch.eye(VOCABULARY), VOCABULARY, 0), tree_builder, BLOCK, requests
    )
    worker.counters, worker.times = StepCounters(worker.depth, "cpu"), StageTimes(enabled=False)
    worker._append_target_hidden_to_draft_kv_by_loc = lambda **written: recorded.injected.append(written)
    return worker


def make_batch(runner, width, temperature=None, mirrored=True):
    """As much of a scheduler's batch as a decode step reads."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    requests = len(PREFIXES)
    info = SimpleNamespace(
        is_all_greedy=temperature is None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
        temperatures=torch.full((requests, 1), temperature or 1.0),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        max_top_k=None,
        sampling_seed=None,
    )
    lens = torch.tensor(PREFIXES)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        is_extend_in_batch=False,
        seq_lens=lens.clone(),
        seq_lens_cpu=lens.clone() if mirrored else None,
        seq_lens_sum=int(lens.sum()) if mirrored else None,
        req_pool_indices=torch.arange(1, requests + 1),
        reqs=[
            make_request(str(number), *told) for number, told in enumerate(zip(PREFIXES, ROOTS, strict=True))
        ],
        input_ids=None,
        out_cache_loc=None,
        device="cpu",
        model_config=runner.model_config,
        hisparse_coordinator=None,
        has_grammar=False,
        return_logprob=False,
        sampling_info=info,
        mamba_track_indices=None,
        can_run_decode_cuda_graph=True,
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor(ROOTS), nxt_kv_lens_cpu=(lens + 2 * width).int()),
    )


def make_request(rid, prefix, root, **sampling):
    """As much of a `Req` as a step reads, one token behind its prompt of `prefix` tokens."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return SimpleNamespace(
        rid=rid,
        sampling_params=SamplingParams(**sampling),
        origin_input_ids=[0] * prefix,
        output_ids=[root],
        eos_token_ids=None,
        tokenizer=None,
    )


def configured(width):
    """SGLang's process-wide values for a tree of this width, on one rank."""
    from contextlib import ExitStack

    from sglang.srt.runtime_context import get_parallel, get_spec

    stack = ExitStack()
    stack.enter_context(get_parallel().override(tp_group=SimpleNamespace(world_size=1)))
    stack.enter_context(
        get_spec().override(
            speculative_num_draft_tokens=width,
            speculative_dflash_block_size=BLOCK,
            speculative_num_steps=BLOCK - 1,
        )
    )
    return stack


def expected_path(tree):
    choices = []
    for node in range(tree.width):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.tokens[at]))
            at = int(tree.parents[at])
        choices.append(next_token(path[::-1]))
    return accept.walk(tree, np.array(choices))
