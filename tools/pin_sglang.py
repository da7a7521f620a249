"""Write engine_patch/sglang_plugin/pins.json from an installed or unpacked SGLang.

    .venv-sglang/bin/python tools/pin_sglang.py [--root FOLDER_OF_THE_PACKAGE] [--check]

Run it after reading every listed function of a new release again; `--check` only says what differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ddtree_engine.sglang_plugin import pin

RELEASE = "0.5.23"

# Hooked, subclassed, called or relied on. `module:Qualified.name`, without arguments.
NAMES = """

sglang.srt.plugins:load_plugins
sglang.srt.utils.common:build_server_info
sglang.srt.sampling.watermarking.core:redact_watermark_secrets
sglang.srt.plugins.hook_registry:HookRegistry
sglang.srt.arg_groups.overrides:record_foreign_defaults
sglang.srt.arg_groups.speculative_hook:handle_speculative_decoding
sglang.srt.arg_groups.speculative_hook:_handle_dflash
sglang.srt.speculative.spec_registry:CustomSpecAlgo
sglang.srt.speculative.spec_registry:register_algorithm
sglang.srt.speculative.spec_info:create_dummy_verify_input
sglang.srt.speculative.dflash_utils:validate_dflash_request
sglang.srt.speculative.dflash_utils:parse_dflash_draft_config
sglang.srt.speculative.dflash_info:DFlashVerifyInput
sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2
sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2
sglang.srt.speculative.base_spec_worker:BaseSpecWorker
sglang.srt.speculative.draft_worker_common:build_draft_tp_worker
sglang.srt.speculative.draft_worker_common:make_draft_sampler_capture_hook
sglang.srt.speculative.eagle_info:EagleVerifyInput
sglang.srt.speculative.eagle_utils:build_tree_kernel_efficient
sglang.srt.speculative.eagle_utils:eagle_prepare_for_verify
sglang.srt.speculative.eagle_utils:eagle_sample
sglang.srt.speculative.eagle_worker_common:run_eagle_verify
sglang.srt.speculative.eagle_worker_common:_finalize_accept_tree_path
sglang.srt.speculative.eagle_worker_common:_compact_accept_to_front
sglang.srt.speculative.spec_utils:move_accept_tokens_to_target_kvcache
sglang.srt.speculative.spec_utils:prepare_mamba_track_for_verify
sglang.srt.speculative.spec_utils:_verify_commit_step_indices
sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify
sglang.srt.speculative.spec_utils:spec_prepare_for_decode
sglang.srt.managers.overlap_utils:FutureMap
sglang.srt.managers.utils:GenerationBatchResult
sglang.srt.managers.scheduler:Scheduler.maybe_init_draft_worker
sglang.srt.managers.scheduler:Scheduler.init_model_worker
sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._resolve_spec_v2_tokens
sglang.srt.managers.scheduler_components.internal_state:SchedulerInternalStateController._add_speculative
sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode
sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len
sglang.srt.mem_cache.kv_loc_plan:KVLocPlan
sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.bind_and_verify_backends
sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan_uniform_extend
sglang.srt.mem_cache.memory_pool:conv_window_dedup_enabled
sglang.srt.mem_cache.memory_pool:MambaPool
sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool
sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache
sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater._assert_weight_cache_inactive
sglang.srt.configs.mamba_utils:Mamba2StateShape
sglang.srt.layers.radix_linear_attention:RadixLinearAttention
sglang.srt.runtime_context:mamba_track_grid
sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.__init__
sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph
sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info
sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.load_batch
sglang.srt.model_executor.model_runner:ModelRunner._get_attention_backend
sglang.srt.model_executor.forward_batch_info:ForwardBatch
sglang.srt.layers.attention.verify_mask:VerifyMask
sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase
sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend
sglang.srt.layers.attention.linear.gdn_backend:GDNKernelDispatcher
sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend
sglang.srt.layers.sampler:multinomial_with_seed
sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_penalties
sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.copy_for_forward
sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo._apply_pre_grammar_logits_transforms
sglang.srt.sampling.penaltylib.frequency_penalty:BatchedFrequencyPenalizer
sglang.srt.sampling.penaltylib.presence_penalty:BatchedPresencePenalizer
sglang.srt.sampling.penaltylib.repetition_penalty:BatchedRepetitionPenalizer
sglang.srt.sampling.penaltylib.repetition_penalty:apply_scaling_penalties
sglang.srt.sampling.penaltylib.min_new_tokens:BatchedMinNewTokensPenalizer
sglang.srt.managers.scheduler:Scheduler._forward_isolation
sglang.srt.managers.schedule_batch:Req.reset_for_retract
sglang.kernels.ops.mamba.causal_conv1d_triton:causal_conv1d_update
sglang.kernels.ops.mamba.causal_conv1d_triton:_causal_conv1d_update_kernel
sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update
sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update_kernel
sglang.kernels.ops.speculative.spec_tree:verify_tree_greedy_func
sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_uniform_func
sglang.kernels.ops.speculative.eagle:prepare_verify_commit_outputs
""".split()  # noqa: SIM905 - one name a line reads and diffs better


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, help="folder of the package (default: the installed one)")
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    options = parser.parse_args()
    root = options.root or pin.package_root()
    sources = {name: pin.source_hash(name, root) for name in NAMES}
    missing = [name for name, value in sources.items() if value is None]
    if missing:
        print(f"error: not in {root}: {', '.join(missing)}", file=sys.stderr)
        return 1
    if options.check:
        _, pinned = pin.load_pins()
        differing = [name for name in NAMES if sources[name] != pinned.get(name)]
        print("\n".join(differing) or "no difference")
        return 1 if differing else 0
    document = {"sglang": RELEASE, "sources": sources}
    pin.PINS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{len(sources)} sources of {root} pinned")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
