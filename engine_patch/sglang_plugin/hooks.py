"""Where stock SGLang has to act differently for a tree, and only for a tree of ours.

Installed in the scheduler process when the worker is created, which is before the pools, the warm-up and the
graphs that they concern. Every hook first asks whether the case is its own and otherwise calls through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ddtree_engine.sglang_plugin.config import StateStore, load_config
from ddtree_engine.sglang_plugin.describe import facts
from ddtree_engine.sglang_plugin.names import MARKER

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

GET_SPEC_INFO = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info"
)
DUMMY_VERIFY_INPUT = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
EAGLE_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
EXTRA_CONTEXT = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
VALIDATE_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
# This one in every process, from registration on: the launcher answers /server_info.
SERVER_INFO = "sglang.srt.utils.common.build_server_info"
# SGLang's last word on what /server_info shows, live state of the schedulers included; as above.
REDACT = "sglang.srt.sampling.watermarking.core.redact_watermark_secrets"
KEYS = ("api_key", "admin_api_key")
INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController._add_speculative"
)


def install() -> list[str]:
    """Register and apply the hooks of this process's mode; returns their targets. Safe to call twice."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, tuple[Callable[..., Any], Any]] = {
        VALIDATE_REQUEST: (refuse_request, HookType.AROUND),
        INTERNAL_STATE: (add_state, HookType.AFTER),
    }
    config = load_config()
    if config.verifies_tree:
        hooks |= {
            GET_SPEC_INFO: (graph_spec_info, HookType.AROUND),
            DUMMY_VERIFY_INPUT: (dummy_verify_input, HookType.AROUND),
            EAGLE_SAMPLE: (sample, HookType.AROUND),
            EXTRA_CONTEXT: (extra_context, HookType.AROUND),
        }
    if config.state is StateStore.WY:
        from ddtree_engine.sglang_plugin.wy import hooks as wy

        hooks |= wy.targets()
    for target, (hook, kind) in hooks.items():
        if not HookRegistry._hooks.get(target):
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    missing = [target for target in hooks if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"{MARKER}: could not hook {', '.join(missing)} (SGLang's log has the reason)")
    logger.info("%s: hooked %s", MARKER, ", ".join(hooks))
    return list(hooks)


def graph_spec_info(original: Original, runner: Any, num_tokens: int) -> Any:
    """The dummy input that a decode graph is captured with."""
    if not is_ours(runner.model_runner.spec_algorithm):
        return original(runner, num_tokens)
    if runner.model_runner.is_draft_worker:
        return _draft_input(runner.captured_req_width)
    return _tree_input(runner.buffers.custom_mask)


def dummy_verify_input(
    original: Original,
    spec_algorithm: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """The dummy input of warm-up runs outside graphs."""
    if not is_ours(spec_algorithm):
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    return _draft_input(num_tokens_per_req) if is_draft_worker else _tree_input(custom_mask)


def sample(
    original: Original, verify_input: Any, batch: Any, logits_output: Any, *rest: Any, **options: Any
) -> Any:
    """Penalties by path; above T=0, sample every node from its own row and walk, else go the stock way."""
    from ddtree_engine.sglang_plugin import sampling
    from ddtree_engine.sglang_plugin.inputs import DDTreeVerifyInput

    if not isinstance(verify_input, DDTreeVerifyInput) or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, *rest, **options)
    if verify_input.penalties is not None:
        verify_input.penalties.apply(logits_output.next_token_logits)
    if batch.sampling_info.is_all_greedy:
        with sampling.without_stock_penalties(batch.sampling_info):
            return original(verify_input, batch, logits_output, *rest, **options)
    grammar_mask = rest[0] if rest else options.get("grammar_mask")
    return sampling.sample_and_walk(verify_input, batch, logits_output, grammar_mask)


def extra_context(original: Original) -> int:
    """Columns of a request's row past the context length: the step's reservation has to fit."""
    from ddtree_engine.sglang_plugin.inputs import reserved_tokens
    from sglang.srt.runtime_context import get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    stock = int(original())
    if not is_ours(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)):
        return stock
    return max(stock, reserved_tokens() + int(get_schedule().page_size) - 1)


def refuse_request(original: Original, request: Any, enable_overlap: bool) -> str | None:
    """A message makes SGLang answer 400."""
    from ddtree_engine.sglang_plugin.requests import refusal

    message: str | None = original(request, enable_overlap)
    return message or refusal(request, load_config())


def add_facts(result: dict[str, Any], server_args: Any, scheduler_info: Any) -> None:
    """What /server_info shows under `ddtree`: the facts that do not change while the server runs."""
    from ddtree_engine.sglang_plugin.names import ALGORITHM, FALLBACK_ALGORITHM

    if result.get("speculative_algorithm") in (ALGORITHM, FALLBACK_ALGORITHM):
        result["ddtree"] = facts(
            load_config(),
            width=int(result["speculative_num_draft_tokens"]),
            block=int(result["speculative_dflash_block_size"]),
        )


def hide_keys(result: Any, *arguments: Any, **options: Any) -> Any:
    """The API keys join what SGLang redacts: a gateway passes /server_info on to clients without a key.

    SGLang calls the hooked function for every dict inside its answer, so that one level is enough.
    """
    if not isinstance(result, dict) or not any(result.get(key) for key in KEYS):
        return result
    return {key: "<redacted>" if key in KEYS and value else value for key, value in result.items()}


def add_state(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """What /server_info shows under `internal_states[i].ddtree`."""
    describe = getattr(controller.scheduler.draft_worker, "describe", None)
    if describe is not None:
        state["ddtree"] = describe()


def is_ours(spec_algorithm: Any) -> bool:
    """Whether the process serves with DDTREE."""
    from ddtree_engine.sglang_plugin.algorithm import DDTreeAlgorithm

    return isinstance(spec_algorithm, DDTreeAlgorithm)


def _draft_input(block: int) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=block,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _tree_input(custom_mask: Any) -> Any:
    from ddtree_engine.sglang_plugin.inputs import DDTreeVerifyInput
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return DDTreeVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=min(spec.speculative_num_steps, spec.speculative_num_draft_tokens - 1),
        topk=spec.speculative_eagle_topk,
        draft_token_num=spec.speculative_num_draft_tokens,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
