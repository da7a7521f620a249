"""From an answer on the wire to the row that is stored, and to the request that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_ops.bench.client import Answer
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.bench.loops import ends_in_loop
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellSpec, ReplicaAt, RequestRow, RequestStatus, StageSeconds


def build_request(
    prompt: Prompt, cell: CellSpec, *, seed: int, max_tokens: int, per_request_budget: bool
) -> dict[str, Any]:
    """The `/generate` body of one request of a cell."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": cell.temperature,
        "ignore_eos": cell.ignore_eos,
    }
    if cell.temperature > 0:
        sampling["sampling_seed"] = seed
    if per_request_budget and cell.budget is not None:
        sampling["custom_params"] = {"ddtree_budget": cell.budget}
    return {**prompt.request(), "sampling_params": sampling}


def make_row(
    answer: Answer,
    cell: CellSpec,
    *,
    prompt: Prompt,
    prompt_index: int,
    repeat: int,
    round_: int,
    order: int,
    position: int = 0,
    place: str | None = None,
    replica: ReplicaAt | None = None,
) -> RequestRow:
    """The row of one request; a field that acceptance needs and the server left out fails the request."""
    meta = answer.meta_info
    engine = meta.get("ddtree") or {}
    error = answer.error or missing_fields(answer, cell.arm)
    stages = engine.get("stage_seconds")
    return RequestRow(
        prompt_id=prompt.id,
        prompt_index=prompt_index,
        repeat=repeat,
        round=round_,
        order=order,
        position=position,
        place=place,
        replica=replica,
        sent_at=answer.sent_at,
        status=RequestStatus.FAILED if error else RequestStatus.OK,
        error=error,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        completion_tokens=len(answer.output_ids),
        finish_reason=_finish(meta),
        output_ids=answer.output_ids,
        ttft_s=answer.chunk_s[0] if answer.chunk_s else None,
        e2e_s=answer.e2e_s,
        chunk_s=answer.chunk_s,
        chunk_tokens=answer.chunk_tokens,
        verify_steps=meta.get("spec_verify_ct"),
        correct_drafts=meta.get("spec_num_correct_drafts"),
        proposed_drafts=meta.get("spec_num_proposed_drafts"),
        accept_histogram=meta.get("spec_correct_drafts_histogram") or [],
        stages=_stages(stages) if isinstance(stages, Mapping) else None,
        tree_nodes=engine.get("tree_nodes"),
        tree_steps=engine.get("tree_steps"),
        steps_below_spine=engine.get("steps_below_spine"),
        steps_scored=engine.get("steps_scored"),
        spine_accept_length=engine.get("spine_accept_length"),
        shadow_accept_length=engine.get("shadow_accept_length"),
        shadow_histogram=engine.get("shadow_histogram") or [],
        loop=ends_in_loop(answer.output_ids),
        empty=not error and not answer.output_ids,
    )


def missing_fields(answer: Answer, arm: Arm) -> str | None:
    """What acceptance needs and the server did not send, in words; the first token comes from the prefill."""
    if arm is Arm.AR or len(answer.output_ids) <= 1:
        return None
    for name in ("spec_verify_ct", "spec_correct_drafts_histogram"):
        if not answer.meta_info.get(name):
            return f"the server sent no meta_info.{name}: its accept length cannot be known"
    return None


def _finish(meta: Mapping[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    return str(reason.get("type")) if isinstance(reason, Mapping) else reason


def _stages(seconds: Mapping[str, Any]) -> StageSeconds:
    return StageSeconds(**{name: float(seconds.get(name) or 0.0) for name in StageSeconds.model_fields})
