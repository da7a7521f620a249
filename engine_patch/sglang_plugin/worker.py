"""One decode step: draft F positions, grow a tree, verify Q nodes, commit the accepted path.

Two worlds meet here. The drafter lives in SGLang's DFLASH world, blocks of F; the target lives in its EAGLE
world, trees of Q nodes. SGLang reads both widths from one configuration value, so the drafter's parts are
built under an override of it and keep what they read.

Mode shadow runs stock DFLASH unchanged and only looks on.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

import torch
from ddtree_engine.sglang_plugin import self_check
from ddtree_engine.sglang_plugin.chooser import WidthChooser
from ddtree_engine.sglang_plugin.config import BuildKernel, Config, Mode, StateStore, load_config
from ddtree_engine.sglang_plugin.describe import Prometheus, WidthSeries, facts
from ddtree_engine.sglang_plugin.draft_sampler import Head, ShadowDraftSampler, TreeDraftSampler
from ddtree_engine.sglang_plugin.errors import ArgumentError
from ddtree_engine.sglang_plugin.inputs import DDTreeVerifyInput, draft_input
from ddtree_engine.sglang_plugin.metrics import StageTimes, StepCounters, StepOutcome
from ddtree_engine.sglang_plugin.names import MARKER
from ddtree_engine.sglang_plugin.penalties import Penalties
from ddtree_engine.sglang_plugin.tree_build import KernelTreeBuilder, TreeBatch, TreeBuilder, encode
from ddtree_engine.sglang_plugin.watch import Watch
from ddtree_engine.sglang_plugin.widths import Widths
from ddtree_engine.sglang_plugin.wy import hooks as wy
from ddtree_engine.sglang_plugin.wy import self_check as wy_self_check
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient, default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

logger = logging.getLogger(__name__)

# Steps between two copies of the counters to the host.
COPY_EVERY = 32


class DDTreeWorkerV2(DFlashWorkerV2):  # type: ignore[misc]
    """`DFlashWorkerV2` whose target verifies a tree, or that watches itself in mode shadow."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.config: Config = load_config()
        spec = get_spec()
        self.block_width = int(spec.speculative_dflash_block_size)
        self.verify_width = int(spec.speculative_num_draft_tokens)
        with self._drafter_world():
            super().__init__(
                server_args=server_args, gpu_id=gpu_id, nccl_port=nccl_port, target_worker=target_worker
            )
        self._refuse_drafter()
        if self.config.verifies_tree:
            self.speculative_num_draft_tokens = self.verify_width
            self.speculative_num_steps = self.block_width - 1
        self._tree_sampler: TreeDraftSampler | None = None
        self._positions: Tensor | None = None
        self._block_ids: Tensor | None = None
        self._output_counts: Penalties | None = None
        self.self_check_report: dict[str, Any] | None = None
        self._seats: dict[str, Any] = facts(self.config, width=self.verify_width, block=self.block_width)
        self.counters = StepCounters(self.depth, self.device)
        self.times = StageTimes(self.config.metrics and str(self.device).startswith("cuda"))
        # With several widths: `verify_width` and `times` are those of the step in the works.
        self.widths: Widths | None = None
        self.chooser: WidthChooser | None = None
        if self.config.widths:
            self.widths = Widths(self, self.config.widths, self.times)
            self.chooser = WidthChooser(self.config)
        self._prometheus: Prometheus | None = None
        self._width_series: WidthSeries | None = None
        first_rank = get_parallel().tp_rank == 0
        self.watch = Watch(self.config, self._shadow_positions(), first_rank)
        if first_rank and self.config.metrics and getattr(server_args, "enable_metrics", False):
            self._prometheus = Prometheus(
                {"mode": str(self.config.mode), "budget": str(self._seats["budget"])}
            )
            if self.config.widths:
                self._width_series = WidthSeries(self.config.widths)
        if first_rank:
            logger.info("%s: worker ready: %s", MARKER, json.dumps(self._seats))
            if self.config.mode is Mode.UNSAFE:
                logger.warning("%s: mode unsafe: siblings share recurrent state, THE TEXT IS WRONG", MARKER)

    @property
    def depth(self) -> int:
        """Most nodes on a path, the root included: the drafter's block, or the tree when that is smaller."""
        return min(self.block_width, self.verify_width)

    def _shadow_positions(self) -> int | None:
        return self.block_width - 1 if self.config.mode is Mode.SHADOW else None

    def _drafter_world(self) -> Any:
        """SGLang's configuration as the drafter has to see it: F tokens, no tree."""
        if not self.config.verifies_tree:
            return contextlib.nullcontext()
        return get_spec().override(
            speculative_num_draft_tokens=self.block_width, speculative_eagle_topk=1, speculative_num_steps=1
        )

    def _refuse_drafter(self) -> None:
        """Refuse drafters whose positions are not independent, or whose logits are not the head's."""
        drafter = parse_dflash_draft_config(draft_hf_config=self.draft_model_runner.model_config.hf_config)
        heads = [
            name
            for name, present in (
                ("selector", self.selector is not None),
                ("LiLiCorr", self.lilicorr is not None),
                ("Domino", self._is_domino),
            )
            if present
        ]
        if heads:
            raise ArgumentError(
                f"--speculative-draft-model-path: found a drafter with a {' and a '.join(heads)} head, "
                "allowed is a plain DFlash drafter: tree scores multiply per-position probabilities"
            )
        if drafter.output_multiplier != 1.0 or drafter.final_logit_softcapping is not None:
            raise ArgumentError(
                "--speculative-draft-model-path: found a drafter that rescales its logits, allowed is one "
                "that uses the target's head as it is"
            )
        if self.use_compact_draft_cache:
            raise ArgumentError("--speculative-draft-window-size: found a value, allowed is unset")

    # -- start-up -----------------------------------------------------------------------------------------

    def init_attention_backends(self) -> None:
        """The drafter's backend, built for F; then what the target's has to look like for a tree."""
        with self._drafter_world():
            super().init_attention_backends()
        if self.config.verifies_tree:
            self.prepare_recurrent_layers()

    def prepare_recurrent_layers(self) -> None:
        """Check the target's attention backend for trees; in mode unsafe, take the tree from it."""
        linear = self._linear_backend()
        if linear is None:
            return
        if linear.topk <= 1:
            raise ArgumentError(
                f"recurrent layers: found topk {linear.topk}, allowed in a tree is more than 1 (the server's "
                "speculative_eagle_topk was lost on the way)"
            )
        if self.config.state is StateStore.WY:
            wy.refuse_backend(self.model_runner, linear)
            return
        windows = self.model_runner.req_to_token_pool.mamba_pool.mamba_cache.intermediate_conv_window
        if not all(window.is_contiguous() for window in windows):
            raise ArgumentError(
                "recurrent layers: found shared convolution windows, allowed in a tree is one window a node"
            )
        if self.config.mode is Mode.UNSAFE:
            # Drops the tree from the recurrent layers: rows are run in order, each from the one before it.
            linear.topk = 1

    @property
    def has_recurrent_layers(self) -> bool:
        return self._linear_backend() is not None

    def _linear_backend(self) -> Any | None:
        """The recurrent layers' attention backend, None on a model without such layers."""
        return getattr(self.model_runner.attn_backend, "linear_attn_backend", None)

    def init_cuda_graphs(self) -> None:
        """Build the candidate sampler, the drafter's graphs around it, and what narrower widths need."""
        self._tree_sampler = self._new_tree_sampler()
        with self._drafter_world():
            super().init_cuda_graphs()
        if self.widths is not None:
            self.widths.capture()

    def _new_tree_sampler(self) -> TreeDraftSampler:
        head = getattr(self.model_runner.model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
            raise ArgumentError(
                "target: found a quantised or missing lm_head, allowed is a dense one (most FP8 checkpoints "
                "keep theirs in bfloat16)"
            )
        shard = getattr(head, "shard_indices", None)
        group = get_parallel().tp_group
        if shard is not None and int(shard.num_added_elements):
            raise ArgumentError("target: found added vocabulary rows, allowed is a head without them")
        if shard is None and group.world_size > 1:
            raise ArgumentError("--tp-size: found a head that is not split by vocabulary, allowed is 1")
        on_card = self.config.build_kernel is BuildKernel.TRITON and weight.is_cuda
        builder = (KernelTreeBuilder if on_card else TreeBuilder)(
            block=self.block_width,
            topk=self.config.topk,
            budget=self._seats["budget"],
            builder=self.config.builder,
            calibration=self.config.calibration,
            device=weight.device,
        )
        batches = [int(self.model_runner.max_running_requests or 1)]
        graph = get_exec().graph.cuda_graph_config.decode
        batches += [int(size) for size in graph.bs or ()]
        return TreeDraftSampler(
            Head(
                weight=weight,
                rows_used=weight.shape[0] if shard is None else int(shard.num_org_elements),
                start=0 if shard is None else int(shard.org_vocab_start_index),
                group=group if group.world_size > 1 else None,
            ),
            builder,
            block=self.block_width,
            max_batch=max(batches),
        )

    def _maybe_build_draft_sampler(self) -> Any:
        assert self._tree_sampler is not None
        if self.config.verifies_tree:
            return self._tree_sampler
        stock = super()._maybe_build_draft_sampler()
        return None if stock is None else ShadowDraftSampler(stock, self._tree_sampler)

    def _defer_target_verify_gather(self) -> Any:
        """Trees are verified on whole logits; DFLASH's shortcut of comparing shards knows chains only."""
        return None if self.config.verifies_tree else super()._defer_target_verify_gather()

    def prewarm_sampling(self) -> Any:
        """The last thing before serving; by now pools, backends and graphs are what they will be."""
        if not self.config.verifies_tree:
            return super().prewarm_sampling()
        result = self.model_runner.prewarm_sampling()
        self.self_check_report = self._warm_up_and_check()
        narrower: dict[str, Any] = {}
        for width in self.config.widths[:-1]:
            assert self.widths is not None
            with self.widths.at(width):
                narrower[str(width)] = self._warm_up_and_check()
        if self.self_check_report is not None:
            if narrower:
                self.self_check_report["narrower"] = narrower
            if get_parallel().tp_rank == 0:
                logger.info("%s: self-check: %s", MARKER, json.dumps(self.self_check_report))
        return result

    def _warm_up_and_check(self) -> dict[str, Any] | None:
        """For the present width: compile what is not in its graphs; the self-check's report, if asked for."""
        wy.warm_up(self.model_runner, self.depth, int(self.model_runner.max_running_requests or 1))
        if not self.config.self_check or self.config.mode is not Mode.TREE:
            return None
        report = self_check.run(self, trees=self.config.self_check)
        if wy.recurrent_of(self.model_runner) is not None and "skipped" not in report:
            report["commit"] = wy_self_check.run(self, trees=self.config.self_check)
        return report

    # -- a step -------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Prefill and idle batches, and all of mode shadow, go the stock way; decode batches draft a tree."""
        stock = (
            not self.config.verifies_tree
            or batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.forward_mode.is_idle()
        )
        if stock:
            self.watch.batch = batch
            if self.config.verifies_tree and not batch.forward_mode.is_idle():
                self._penalties().prefill(batch)
            return super().forward_batch_generation(
                batch,
                on_publish=on_publish,
                grammar_barrier=grammar_barrier,
                pp_proxy_tensors=pp_proxy_tensors,
            )
        if self.widths is None or self.chooser is None:
            return self._decode(batch, on_publish, grammar_barrier)
        with self.widths.at(self.chooser.choose(batch.reqs)):
            return self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        # Published by the step before, perhaps on another stream.
        if batch.seq_lens.is_cuda:
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix = batch.seq_lens
        requests = len(prefix)
        self.times.mark("start")
        host_lens = self._host_lens(batch)
        tree = self._draft(batch, host_lens)
        if tree.tokens.shape[1] > self.verify_width:
            tree = tree.first(self.verify_width)
        self.times.mark("draft")

        verify_input, plan = self.verify_input(batch, tree, host_lens)
        verify_input.penalties = self._penalties().step(batch, tree, self.depth)
        batch.spec_info = verify_input
        with self._host_lens_of_verify(batch, host_lens):
            result = run_eagle_verify(
                batch,
                target_worker=self.target_worker,
                req_to_token_pool=self.model_runner.req_to_token_pool,
                token_to_kv_pool_allocator=self.model_runner.token_to_kv_pool_allocator,
                plan_stream=None,
                plan_stream_ctx=contextlib.nullcontext(),
                topk=verify_input.topk,
                num_draft_tokens=self.verify_width,
                device=self.device,
                metadata_ready_pre_pad=False,
                finalize_tree_path=True,
                grammar_barrier=grammar_barrier,
            )
        if verify_input.penalties is not None:
            verify_input.penalties.commit(result.accept_index)
        self.times.mark("verify")
        # Before the drafter's cache is written: from here on the scheduler may prepare the next step.
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._inject(result.logits_output.hidden_states, plan, prefix, result.accept_lens)
        self.times.mark("inject")
        self._count(batch, tree, result)
        # Only the drafter needed them; overlapped scheduling would copy them to the host.
        result.logits_output.hidden_states = None
        result.next_draft_input = draft_input(result.next_draft_input.bonus_tokens, result.new_seq_lens)
        result.speculative_num_draft_tokens = self.verify_width
        self.times.end_step()
        assert requests == len(result.accept_lens)
        return result

    def _penalties(self) -> Penalties:
        """Made at the first pass: the pools are not there when the worker is."""
        if self._output_counts is None:
            runner = self.model_runner
            self._output_counts = Penalties(
                slots=len(runner.req_to_token_pool.req_to_token),
                vocabulary=int(runner.model_config.vocab_size),
                device=self.device,
            )
        return self._output_counts

    def _make_next_draft_input_prefill(self, *, bonus_tokens: Tensor, seq_lens: Tensor) -> Any:
        """What a prefill hands to the first step; how much a step reserves depends on its type."""
        if not self.config.verifies_tree:
            return super()._make_next_draft_input_prefill(bonus_tokens=bonus_tokens, seq_lens=seq_lens)
        return draft_input(bonus_tokens, seq_lens)

    def _host_lens(self, batch: Any) -> Tensor:
        """int64[N] on the host, at least the committed length of every request."""
        if batch.seq_lens_cpu is not None:
            lens: Tensor = batch.seq_lens_cpu
            return lens.long()
        reserved: Tensor | None = batch.spec_info.nxt_kv_lens_cpu
        if reserved is not None:
            return reserved.long()
        return torch.tensor([request.kv.kv_allocated_len for request in batch.reqs], dtype=torch.int64)

    @contextlib.contextmanager
    def _host_lens_of_verify(self, batch: Any, host_lens: Tensor) -> Any:
        """Verify plans with host lengths that include its own nodes; the batch keeps its committed ones."""
        saved = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = host_lens + self.verify_width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        try:
            yield
        finally:
            batch.seq_lens_cpu, batch.seq_lens_sum = saved

    def _draft(self, batch: Any, host_lens: Tensor) -> TreeBatch:
        """Run the drafter over [bonus, MASK x (F-1)] and return the trees built behind it."""
        requests, block = len(batch.seq_lens), self.block_width
        block_ids, positions = self._block_buffers(requests)
        lens = host_lens + block
        plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host_lens,
            width=block,
            positions_out=positions,
            anchor_src=batch.spec_info.bonus_tokens.view(-1),
            anchor_out=block_ids,
        )
        embeds = self.model_runner.model.get_input_embeddings()(block_ids)
        if self._noise_embed_scale != 1.0:
            embeds = embeds * self._noise_embed_scale
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=None,
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            positions=positions.flatten(),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), requests * block, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=requests * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward_batch, self.draft_model_runner.kv_index_translator)
        assert self._tree_sampler is not None
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward_batch)
            if self._draft_sampler is None or not out.can_run_graph:
                self._tree_sampler(out.logits_output.hidden_states, forward_batch.input_ids)
        return self._tree_sampler.trees(requests)

    def _block_buffers(self, requests: int) -> tuple[Tensor, Tensor]:
        """(block_ids, positions) int64[N, F]; of block_ids only column 0 ever changes."""
        if self._block_ids is None or len(self._block_ids) < requests:
            shape = (max(requests, int(self.model_runner.max_running_requests or 1)), self.block_width)
            self._block_ids = torch.full(
                shape, int(self._mask_token_id), dtype=torch.int64, device=self.device
            )
            self._positions = torch.zeros(shape, dtype=torch.int64, device=self.device)
        assert self._positions is not None
        return self._block_ids[:requests], self._positions[:requests]

    def verify_input(self, batch: Any, tree: TreeBatch, host_lens: Tensor) -> tuple[DDTreeVerifyInput, Any]:
        """The tree as SGLang's verify takes it, and the plan of the KV slots that its nodes are written to.

        Of the batch `seq_lens` and `req_pool_indices` are read; `host_lens` int64[N] is at least `seq_lens`.
        """
        requests = len(batch.seq_lens)
        mask = self.model_runner.attn_backend.verify_mask
        buffer = mask.buffer if mask is not None and mask.fits(requests) else None
        mode = default_tree_mask_mode() if mask is None else mask.mode
        parent_list, selected = encode(tree.parents)
        recurrent = wy.recurrent_of(self.model_runner)
        if recurrent is not None:
            recurrent.stash.set_trees(tree.parents)
        built = build_tree_kernel_efficient(
            tree.tokens[:, 0],
            parent_list,
            selected,
            tree.tokens[:, 1:],
            batch.seq_lens,
            # Sizes the mask when there is no buffer for it; too large does no harm.
            0 if buffer is not None else requests * self._context_columns(),
            self.verify_width,
            2,
            self.verify_width,
            mode,
            buffer,
            fill_prefix_mask=mask is None or mask.is_read,
        )
        tree_mask, positions, index, first_child, next_sibling, tokens = built
        plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host_lens,
            width=self.verify_width,
        )
        spec = get_spec()
        verify_input = DDTreeVerifyInput(
            draft_token=tokens,
            custom_mask=tree_mask,
            positions=positions,
            retrieve_index=index,
            retrieve_next_token=first_child,
            retrieve_next_sibling=next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.depth - 1,
            topk=int(spec.speculative_eagle_topk),
            draft_token_num=self.verify_width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=plan.write_virtual,
            kv_loc_plan=plan,
        )
        return verify_input, plan

    def _context_columns(self) -> int:
        return int(self.model_runner.attn_backend.max_context_len)

    def _inject(self, hidden: Tensor, plan: Any, prefix: Tensor, accepted: Tensor) -> None:
        """Write the accepted path's target states, by now at the front, into the drafter's cache."""
        requests, depth = len(prefix), self.depth
        hidden = hidden[: requests * self.verify_width].view(requests, self.verify_width, -1)[:, :depth]
        slots = self._draft_write_ids(plan).view(requests, self.verify_width)[:, :depth].contiguous()
        positions = prefix[:, None] + torch.arange(depth, device=prefix.device)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.reshape(requests * depth, -1),
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=positions.view(-1),
            commit_lens=accepted,
        )

    # -- what the steps did -------------------------------------------------------------------------------

    def _count(self, batch: Any, tree: TreeBatch, result: Any) -> None:
        if not self.config.metrics and self.config.step_log is None and self.chooser is None:
            return
        assert self._tree_sampler is not None
        requests = len(batch.reqs)
        offsets = torch.arange(requests, device=result.accept_index.device)[:, None] * self.verify_width
        outcome = StepOutcome(
            tree=tree,
            spine=self._tree_sampler.ids[:requests, :, 0],
            path=(result.accept_index.long() - offsets).masked_fill(result.accept_index < 0, -1),
            accepted=result.accept_lens.long(),
            bonus=result.next_draft_input.bonus_tokens.long(),
            parents_seen=self.parents_seen(requests),
        )
        if self.chooser is not None:
            self.chooser.note(self.verify_width, outcome)
        # The host reads one number per request and step from here: it becomes `spec_cap_length` in meta_info.
        result.cap_lens = self.counters.add(outcome)
        if self.counters.steps % COPY_EVERY == 0:
            self.counters.start_copy()
        if self.config.step_log is not None:
            self.watch.log_tree_step(
                batch, outcome, self._tree_sampler, result.logits_output.next_token_logits
            )

    def parents_seen(self, requests: int) -> Tensor | None:
        """Parent rows as the recurrent layers' kernels had them in this verify pass."""
        recurrent = wy.recurrent_of(self.model_runner)
        if recurrent is not None:
            return recurrent.stash.parents_seen(requests)
        linear = self._linear_backend()
        if linear is None or linear.forward_metadata is None:
            return None
        parents: Tensor | None = linear.forward_metadata.retrieve_parent_token
        return None if parents is None else parents[:requests]

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: Tensor, lm_head: Any, **rest: Any
    ) -> Any:
        """DFLASH without drafter graphs; in mode shadow the tree is built beside it."""
        chain = super()._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden_states, lm_head=lm_head, **rest
        )
        if self.config.mode is Mode.SHADOW and self._tree_sampler is not None:
            positions = self.block_width - 1
            hidden = hidden_states.view(-1, positions, hidden_states.shape[-1])
            padded = torch.nn.functional.pad(hidden, (0, 0, 1, 0)).reshape(-1, hidden_states.shape[-1])
            roots = self._draft_block_ids_buf[: len(hidden)]
            self._tree_sampler(padded, roots.reshape(-1))
        return chain

    def _accept_block(self, **arguments: Any) -> Any:
        """DFLASH's accept; in mode shadow its outcome goes to the scorer."""
        outcome = super()._accept_block(**arguments)
        if self.config.mode is Mode.SHADOW and self._tree_sampler is not None:
            _, commit_lens, _, out_tokens, _ = outcome
            requests = arguments["bs"]
            self.watch.log_chain_step(
                self._tree_sampler.trees(requests), self._tree_sampler, commit_lens, out_tokens
            )
        return outcome

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called when a step's result has reached the host."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)
        self.watch.drain()
        if self.chooser is not None:
            self.chooser.processed()
        if self._prometheus is not None:
            self._prometheus.update(self.counters.read())
        if self._width_series is not None and self.chooser is not None:
            self._width_series.update(self.chooser.read())

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called when a request has ended."""
        super().note_request_finished(rid=rid, natural_stop=natural_stop)
        self.watch.finish(rid)

    def describe(self) -> dict[str, Any]:
        """What /server_info shows as `ddtree`."""
        described = dict(self._seats)
        if self.config.verifies_tree:
            self.counters.start_copy()
            described |= self.counters.read() | self.times.read()
            if self.widths is not None and self.chooser is not None:
                described |= self.chooser.read()
                for width, times in self.widths.times.items():
                    described["by_width"][str(width)] |= times.read()
        else:
            described |= self.watch.read()
        described["state_scratch_bytes"] = wy.scratch_bytes(self.model_runner)
        described["self_check"] = self.self_check_report
        return described
