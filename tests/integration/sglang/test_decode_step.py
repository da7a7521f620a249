"""A decode step of the real worker through SGLang's real verify code, on the CPU.

The two models are stand-ins that compute: the drafter proposes what a table says, the target's next token is
a function of the whole path. SGLang's tree kernels run as Triton in the interpreter. What has to come out is
what the CPU tree core says.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin import hooks
from ddtree_engine.sglang_plugin.config import parse_config
from ddtree_engine.sglang_plugin.draft_sampler import Head, TreeDraftSampler
from ddtree_engine.sglang_plugin.metrics import StageTimes, StepCounters
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder
from ddtree_engine.tree import accept
from ddtree_engine.tree.build import Builder, build_tree

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


@pytest.fixture
def step(published, monkeypatch):
    """Build a worker for a width and run one step; returns what came out and what was written where."""
    from ddtree_engine.sglang_plugin import worker as worker_module
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_parallel, get_spec
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

    def run(width, builder=Builder.BEST_FIRST, topk=TOPK, temperature=None, seed=0, mirrored=True):
        requests = len(PREFIXES)
        depth = min(BLOCK, width)
        rng = np.random.default_rng(seed)
        logits = np.stack([candidate_logits(rng, root) for root in ROOTS])
        columns = 128
        table = torch.arange((requests + 1) * columns, dtype=torch.int32).view(requests + 1, columns)
        moved, committed, injected, published_lens = [], [], [], []
        cache = SimpleNamespace(move_kv_cache=lambda target, source: moved.append((target, source)))
        allocator = SimpleNamespace(get_kvcache=lambda: cache)
        embedding = torch.nn.Embedding(VOCABULARY, 8)
        runner = SimpleNamespace(
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
            model_config=SimpleNamespace(vocab_size=VOCABULARY, model_is_mrope=False),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=allocator,
            decode_cuda_graph_runner=None,
            max_running_requests=requests,
            watermark_state=None,
            device="cpu",
            page_size=1,
            attn_backend=SimpleNamespace(
                verify_mask=None,
                max_context_len=columns,
                update_mamba_state_after_mtp_verify=lambda **steps: committed.append(steps),
            ),
        )
        runner.model = SimpleNamespace(get_input_embeddings=lambda: embedding)
        translator = KVIndexTranslator.__new__(KVIndexTranslator)
        pass_through = SimpleNamespace(key="all", write=None, read_v2p=None)
        monkeypatch.setattr(KVIndexTranslator, "space", lambda self, kind: pass_through)
        monkeypatch.setattr(KVIndexTranslator, "reads_are_translated", False)
        translator.req_to_token = table
        translator.page_size = 1
        runner.kv_index_translator = translator

        drafted = []

        def draft(forward_batch):
            drafted.append(forward_batch)
            hidden = torch.zeros(requests, BLOCK, VOCABULARY)
            hidden[:, 1:] = torch.from_numpy(logits)
            output = SimpleNamespace(hidden_states=hidden.view(-1, VOCABULARY))
            return SimpleNamespace(logits_output=output, can_run_graph=False)

        worker = worker_module.DDTreeWorkerV2.__new__(worker_module.DDTreeWorkerV2)
        worker.config = parse_config(f'{{"topk": {topk}, "builder": "{builder}"}}')
        worker.block_width, worker.verify_width, worker.device = BLOCK, width, "cpu"
        worker.model_runner = runner
        worker._target_worker = Target(runner)
        worker.draft_model_runner = SimpleNamespace(forward=draft, kv_index_translator=translator)
        worker.draft_parallel_layout = worker._draft_sampler = worker._draft_block_spec_info = None
        worker._mask_token_id, worker._noise_embed_scale = VOCABULARY - 1, 1.0
        worker._block_ids = worker._positions = None
        tree_builder = TreeBuilder(BLOCK, topk, width - 1, builder, None, "cpu")
        head = Head(torch.eye(VOCABULARY), VOCABULARY, 0)
        worker._tree_sampler = TreeDraftSampler(head, tree_builder, BLOCK, requests)
        worker.counters, worker.times = StepCounters(depth, "cpu"), StageTimes(enabled=False)
        worker._append_target_hidden_to_draft_kv_by_loc = lambda **written: injected.append(written)

        greedy = temperature is None
        info = SimpleNamespace(
            is_all_greedy=greedy,
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
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            is_extend_in_batch=False,
            seq_lens=lens.clone(),
            seq_lens_cpu=lens.clone() if mirrored else None,
            seq_lens_sum=int(lens.sum()) if mirrored else None,
            req_pool_indices=torch.arange(1, requests + 1),
            reqs=[SimpleNamespace(rid=str(number)) for number in range(requests)],
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
            spec_info=SimpleNamespace(
                bonus_tokens=torch.tensor(ROOTS), nxt_kv_lens_cpu=(lens + 2 * width).int()
            ),
        )
        alone = SimpleNamespace(world_size=1)
        with (
            get_parallel().override(tp_group=alone),
            get_spec().override(
                speculative_num_draft_tokens=width,
                speculative_dflash_block_size=BLOCK,
                speculative_num_steps=depth - 1,
            ),
        ):
            result = worker.forward_batch_generation(batch, on_publish=published_lens.append)
        log_probs = torch.log_softmax(torch.from_numpy(logits), -1)
        best = log_probs.topk(topk, dim=-1)
        trees = [
            build_tree(root, best.indices[row].numpy(), best.values[row].numpy(), width - 1, builder)
            for row, root in enumerate(ROOTS)
        ]
        return SimpleNamespace(
            result=result,
            batch=batch,
            worker=worker,
            trees=trees,
            expected=[expected_path(tree) for tree in trees],
            moved=moved,
            committed=committed,
            injected=injected,
            published=published_lens,
            drafted=drafted,
            table=table,
            depth=depth,
            width=width,
        )

    return run


def expected_path(tree):
    choices = []
    for node in range(tree.width):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.tokens[at]))
            at = int(tree.parents[at])
        choices.append(next_token(path[::-1]))
    return accept.walk(tree, np.array(choices))


WIDTHS = [4, 8, 16]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("builder", [Builder.BEST_FIRST, Builder.SPINE_FIRST])
def test_a_step_accepts_what_the_tree_core_accepts(width, builder, step):
    for seed in range(3):
        done = step(width, builder, seed=seed)
        lengths = [walked.accept_length for walked in done.expected]
        assert done.result.accept_lens.tolist() == lengths
        assert done.result.next_draft_input.bonus_tokens.tolist() == [walk.bonus for walk in done.expected]
        emitted = done.result.next_token_ids.view(-1, width)
        for row, (tree, walked) in enumerate(zip(done.trees, done.expected, strict=True)):
            tokens = [int(tree.tokens[node]) for node in walked.path[1:]] + [walked.bonus]
            assert emitted[row, : len(tokens)].tolist() == tokens
        assert done.result.speculative_num_draft_tokens == width


@pytest.mark.parametrize("width", WIDTHS)
def test_kv_of_the_accepted_path_moves_to_the_front(width, step):
    done = step(width)
    ((targets, sources),) = done.moved
    wanted = []
    for row, (prefix, walked) in enumerate(zip(PREFIXES, done.expected, strict=True)):
        slots = done.table[row + 1, prefix : prefix + width].tolist()
        wanted += [(slots[place], slots[node]) for place, node in enumerate(walked.path)]
    assert list(zip(targets.tolist(), sources.tolist(), strict=True))[: len(wanted)] == wanted
    # What is left over moves padding onto itself.
    assert not targets[len(wanted) :].any()
    assert not sources[len(wanted) :].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_recurrent_state_of_the_last_accepted_node_is_committed(width, step):
    done = step(width)
    (commit,) = done.committed
    assert commit["last_correct_step_indices"].tolist() == [walked.path[-1] for walked in done.expected]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_drafter_gets_the_hidden_states_of_the_accepted_path_at_their_positions(width, step):
    done = step(width)
    (written,) = done.injected
    depth = done.depth
    hidden = written["target_hidden"].view(3, depth, -1)[..., 0]
    for row, (prefix, walked) in enumerate(zip(PREFIXES, done.expected, strict=True)):
        length = walked.accept_length
        assert hidden[row, :length].tolist() == [row * width + node for node in walked.path]
        assert written["cache_loc_2d"][row].tolist() == done.table[row + 1, prefix : prefix + depth].tolist()
        assert written["positions"].view(3, depth)[row].tolist() == list(range(prefix, prefix + depth))
    assert written["commit_lens"].tolist() == [walked.accept_length for walked in done.expected]
    assert done.result.logits_output.hidden_states is None


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_drafter_sees_its_block_and_the_batch_keeps_its_lengths(mirrored, step):
    done = step(16, mirrored=mirrored)
    (forward_batch,) = done.drafted
    assert forward_batch.input_ids.view(3, BLOCK)[:, 0].tolist() == ROOTS
    assert forward_batch.input_ids.view(3, BLOCK)[:, 1:].unique().tolist() == [VOCABULARY - 1]
    assert forward_batch.positions.view(3, BLOCK)[:, 0].tolist() == PREFIXES
    assert forward_batch.out_cache_loc.view(3, BLOCK)[0].tolist() == done.table[1, 5 : 5 + BLOCK].tolist()
    assert (forward_batch.seq_lens_cpu >= torch.tensor(PREFIXES)).all()
    assert done.batch.seq_lens.tolist() == PREFIXES
    assert (done.batch.seq_lens_cpu is not None) == mirrored
    lengths = [walked.accept_length for walked in done.expected]
    assert done.published[0].tolist() == [p + n for p, n in zip(PREFIXES, lengths, strict=True)]
    assert done.result.next_draft_input.new_seq_lens.tolist() == done.published[0].tolist()


def test_positions_follow_depth_not_rows(step):
    done = step(16)
    seen = done.worker._target_worker.seen
    for row, (prefix, tree) in enumerate(zip(PREFIXES, done.trees, strict=True)):
        assert seen.positions.view(3, 16)[row].tolist() == (tree.depths + prefix).tolist()
        assert seen.input_ids.view(3, 16)[row].tolist() == tree.tokens.tolist()


def test_one_candidate_a_position_at_the_blocks_width_is_dflash(step):
    done = step(BLOCK, topk=1)
    chains = [accept.chain_accept(tree.tokens[1:], truth(tree.tokens[0])) for tree in done.trees]
    assert (done.result.accept_lens - 1).tolist() == chains


def truth(root):
    path = [int(root)]
    for _ in range(BLOCK - 1):
        path.append(next_token(path))
    return path[1:]


def test_a_near_zero_temperature_walks_like_greedy_through_the_sampling_path(step):
    greedy, sampled = step(16, seed=4), step(16, seed=4, temperature=1e-3)
    assert sampled.result.accept_lens.tolist() == greedy.result.accept_lens.tolist()
    for row, length in enumerate(greedy.result.accept_lens.tolist()):
        ours, theirs = (run.result.next_token_ids.view(3, 16)[row, :length] for run in (sampled, greedy))
        assert ours.tolist() == theirs.tolist()


def test_counters_know_the_chain_inside_the_tree(step):
    totals = {"accepted": 0, "chain_accepted": 0}
    for seed in range(4):
        done = step(32, Builder.SPINE_FIRST, seed=seed)
        read = dict(
            zip(
                ("requests", "accepted", "chain_accepted", "below_spine"),
                done.worker.counters._totals.tolist(),
                strict=False,
            )
        )
        chains = [
            accept.chain_accept([int(tree.tokens[node]) for node in tree.spine()[1:]], truth(tree.tokens[0]))
            for tree in done.trees
        ]
        assert read["requests"] == 3
        assert read["accepted"] == sum(walked.matched for walked in done.expected)
        assert read["chain_accepted"] == sum(chains)
        assert read["below_spine"] == 0
        assert done.result.cap_lens.tolist() == chains
        totals["accepted"] += read["accepted"]
        totals["chain_accepted"] += read["chain_accepted"]
    assert totals["accepted"] > totals["chain_accepted"]
