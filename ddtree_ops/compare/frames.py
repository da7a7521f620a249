"""Pandas frames from request rows: one row a request, and its sums by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ddtree_ops.compare.load import Cell, Results
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import RequestRow, RequestStatus

#: Summed over a prompt's requests by :func:`by_prompt`.
SUMMED = (
    "completion_tokens",
    "target_steps",
    "e2e_s",
    "shadow_tokens",
    "shadow_steps",
    "spine_tokens",
    "steps_scored",
    "step_tokens",
    "counted_steps",
)


def requests_frame(results: Results) -> pd.DataFrame:
    """One row for each request of each sealed cell, failed requests included. Times are seconds."""
    return pd.DataFrame([_request(cell, row) for cell in results.cells for row in cell.rows])


def cell_frame(cell: Cell) -> pd.DataFrame:
    """The rows of one cell, in the same columns as :func:`requests_frame`."""
    return pd.DataFrame([_request(cell, row) for row in cell.rows])


def by_prompt(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums over the successful requests of each prompt, indexed by ``prompt_id`` in dataset order."""
    if frame.empty:
        return pd.DataFrame(columns=list(SUMMED))
    done = frame[frame["status"] == RequestStatus.OK.value]
    grouped = done.groupby(["prompt_index", "prompt_id"], sort=True)[list(SUMMED)]
    return grouped.sum(min_count=1).droplevel("prompt_index")


def by_position(frame: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """:func:`by_prompt` of each position, all over the same prompts.

    One frame of everything, as position 0, where a position lacks prompts: an unfinished cell.
    """
    whole = by_prompt(frame)
    if frame.empty:
        return {0: whole}
    positions = sorted({int(position) for position in frame["position"]})
    parts = {position: by_prompt(frame[frame["position"] == position]) for position in positions}
    full = all(part.index.equals(whole.index) for part in parts.values())
    return parts if full else {0: whole}


def paired_sums(
    ours: pd.DataFrame, theirs: pd.DataFrame
) -> tuple[dict[int, pd.DataFrame], dict[int, pd.DataFrame], int]:
    """:func:`by_position` of two cells over the prompts that both answered, and how many those are.

    Cells with other positions (of two runs) are paired by prompt alone.
    """
    parts, others = by_position(ours), by_position(theirs)
    if parts.keys() != others.keys():
        parts, others = {0: by_prompt(ours)}, {0: by_prompt(theirs)}
    first, second = next(iter(parts.values())), next(iter(others.values()))
    common = [prompt for prompt in second.index if prompt in first.index]
    mine = {position: part.loc[common] for position, part in parts.items()}
    return mine, {position: part.loc[common] for position, part in others.items()}, len(common)


def target_steps(arm: Arm, row: RequestRow) -> int | None:
    """Target passes that a request decoded with: its verify steps; a token each for ``ar``."""
    return row.completion_tokens if arm is Arm.AR else row.verify_steps


def step_counts(histogram: Sequence[int]) -> tuple[int, int] | None:
    """Accepted drafts plus a bonus token for each step, summed, and the steps; None without steps."""
    steps = sum(histogram)
    return (sum((drafts + 1) * count for drafts, count in enumerate(histogram)), steps) if steps else None


def shadow_counts(row: RequestRow) -> tuple[float, int] | None:
    """Tokens that the logged trees would have accepted, bonus included, and the steps they were scored on."""
    counts = step_counts(row.shadow_histogram)
    if counts is not None:
        return counts
    if row.shadow_accept_length is None or not row.verify_steps:
        return None
    return row.shadow_accept_length * row.verify_steps, row.verify_steps


def _request(cell: Cell, row: RequestRow) -> dict[str, Any]:
    spec, stages, shadow, steps = cell.spec, row.stages, shadow_counts(row), step_counts(row.accept_histogram)
    spine = row.spine_accept_length
    return {
        "cell": cell.record.key[:16],
        "state": cell.record.state.value,
        "arm": spec.arm.value,
        "budget": spec.budget,
        "builder": spec.builder.value if spec.builder else None,
        "concurrency": spec.concurrency,
        "temperature": spec.temperature,
        "prompt_id": row.prompt_id,
        "prompt_index": row.prompt_index,
        "repeat": row.repeat,
        "round": row.round,
        "order": row.order,
        "sent_at": row.sent_at,
        "status": row.status.value,
        "error": row.error,
        "finish_reason": row.finish_reason,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
        "verify_steps": row.verify_steps,
        "target_steps": target_steps(spec.arm, row),
        "correct_drafts": row.correct_drafts,
        "proposed_drafts": row.proposed_drafts,
        "ttft_s": row.ttft_s,
        "tpot_s": row.tpot_s,
        "e2e_s": row.e2e_s,
        "tokens_per_second": row.tokens_per_second,
        "chunks": len(row.chunk_s),
        "draft_s": stages.draft if stages else None,
        "build_s": stages.build if stages else None,
        "verify_s": stages.verify if stages else None,
        "commit_s": stages.commit if stages else None,
        "tree_nodes": row.tree_nodes,
        "tree_steps": row.tree_steps,
        "steps_below_spine": row.steps_below_spine,
        "steps_scored": row.steps_scored,
        "spine_tokens": spine * row.steps_scored if spine is not None and row.steps_scored else None,
        "shadow_tokens": shadow[0] if shadow else None,
        "shadow_steps": shadow[1] if shadow else None,
        "step_tokens": steps[0] if steps else None,
        "counted_steps": steps[1] if steps else None,
        "loop": row.loop,
        "empty": row.empty,
        "position": row.position,
        "place": row.place,
        "replica": row.number,
        "host": row.replica.host if row.replica else None,
        "endpoint": row.replica.endpoint if row.replica else None,
        "cards": " ".join(map(str, row.replica.cards)) if row.replica else None,
    }
