"""What is measured of one cell: figures with intervals, counters, stage times and latencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd

from ddtree_ops.compare.frames import by_position, by_prompt, cell_frame
from ddtree_ops.compare.load import Cell
from ddtree_ops.compare.statistics import Bootstrap, Interval, Values
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import Parity, RequestRow, StageSeconds

STAGES: tuple[str, ...] = tuple(StageSeconds.model_fields)


@dataclass(frozen=True)
class Quantiles:
    """Seconds. ``largest`` stands for the tail: with few requests a 99th percentile is the maximum."""

    median: float
    p90: float
    largest: float
    n: int


@dataclass(frozen=True)
class Latency:
    """Request latencies; ``itl`` is over chunks, and a chunk of a speculative arm carries several tokens."""

    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    tokens_per_chunk: float | None


@dataclass(frozen=True)
class Measures:
    """The figures of a cell. Rates are ratios of sums over its successful requests."""

    cell: Cell
    frame: pd.DataFrame = field(repr=False, compare=False)
    prompts: int
    completion_tokens: int
    verify_steps: int | None
    accept_length: Interval | None
    tokens_per_second: Interval | None
    shadow_estimate: Interval | None
    spine_accept_length: float | None
    histogram: tuple[int, ...]
    stage_ms: dict[str, float] | None
    latency: Latency
    loops: int
    empty: int
    unstable: int
    steps_below_spine: int | None
    steps_scored: int | None
    tree_steps: int | None

    def parity(self, reference: Arm) -> Parity | None:
        return next((item for item in self.cell.record.parity if item.reference is reference), None)


def measure(cell: Cell, *, seed: int = 0) -> Measures:
    """Measure a cell; the bootstrap draws depend on ``seed`` and the number of prompts only."""
    frame = cell_frame(cell)
    sums = by_prompt(frame)
    parts = by_position(frame)
    rows = cell.ok_rows
    bootstrap = Bootstrap(len(sums), positions=len(parts), seed=seed)
    return Measures(
        cell=cell,
        frame=frame,
        prompts=len(sums),
        completion_tokens=sum(row.completion_tokens for row in rows),
        verify_steps=_total(row.verify_steps for row in rows),
        accept_length=rate(bootstrap, parts, "completion_tokens", "target_steps"),
        tokens_per_second=rate(bootstrap, parts, "completion_tokens", "e2e_s"),
        shadow_estimate=rate(bootstrap, parts, "shadow_tokens", "shadow_steps"),
        spine_accept_length=_spine(sums),
        histogram=_histogram(rows),
        stage_ms=_stage_ms(cell.arm, rows),
        latency=_latency(rows),
        loops=sum(row.loop for row in rows),
        empty=sum(row.empty for row in rows),
        unstable=unstable_prompts(cell),
        steps_below_spine=_total(row.steps_below_spine for row in rows),
        steps_scored=_total(row.steps_scored for row in rows),
        tree_steps=_total(row.tree_steps for row in rows),
    )


def rate(
    bootstrap: Bootstrap, parts: Mapping[int, pd.DataFrame], numerator: str, denominator: str
) -> Interval | None:
    """Ratio of two summed columns of the positions' sums; None where a prompt lacks one of them."""
    if any(part.empty or lacks(part, numerator, denominator) for part in parts.values()):
        return None
    return bootstrap.ratio_of_sums(column(parts, numerator), column(parts, denominator))


def column(parts: Mapping[int, pd.DataFrame], name: str) -> Values:
    """A row of numbers for each position."""
    return [[float(value) for value in part[name]] for part in parts.values()]


def lacks(sums: pd.DataFrame, *names: str) -> bool:
    """Whether a prompt has no number in one of these columns."""
    return bool(sums[list(names)].isna().any(axis=None))


def unstable_prompts(cell: Cell) -> int:
    """Prompts whose greedy output differs between repeats: a rate over them compares unlike work."""
    if cell.spec.temperature > 0:
        return 0
    outputs: dict[str, set[tuple[int, ...]]] = {}
    for row in cell.ok_rows:
        outputs.setdefault(row.prompt_id, set()).add(tuple(row.output_ids))
    return sum(len(seen) > 1 for seen in outputs.values())


def first_difference(output: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first differing token; None where equal, the shorter's length if it is a prefix."""
    for index, (token, expected) in enumerate(zip(output, reference, strict=False)):
        if token != expected:
            return index
    return None if len(output) == len(reference) else min(len(output), len(reference))


def outputs_by_request(cell: Cell) -> dict[tuple[str, int, int], list[int]]:
    """Output tokens by (prompt, repeat, number of the replica) of the successful requests."""
    return {(row.prompt_id, row.repeat, row.number): row.output_ids for row in cell.ok_rows}


def differences(cell: Cell, reference: Cell) -> dict[str, int | None]:
    """For each prompt that both answered: where the output of its first repeat leaves the reference's."""
    theirs: dict[str, list[int]] = {}
    for (prompt, *_), output in sorted(outputs_by_request(reference).items()):
        theirs.setdefault(prompt, output)
    ours: dict[str, list[int]] = {}
    for (prompt, *_), output in sorted(outputs_by_request(cell).items()):
        ours.setdefault(prompt, output)
    return {prompt: first_difference(ours[prompt], theirs[prompt]) for prompt in ours if prompt in theirs}


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _spine(sums: pd.DataFrame) -> float | None:
    known = sums.dropna(subset=["spine_tokens", "steps_scored"]) if not sums.empty else sums
    steps = float(known["steps_scored"].sum()) if not known.empty else 0.0
    return float(known["spine_tokens"].sum()) / steps if steps else None


def _histogram(rows: Sequence[RequestRow]) -> tuple[int, ...]:
    width = max((len(row.accept_histogram) for row in rows), default=0)
    totals = [0] * width
    for row in rows:
        for drafts, count in enumerate(row.accept_histogram):
            totals[drafts] += count
    return tuple(totals)


def _stage_ms(arm: Arm, rows: Sequence[RequestRow]) -> dict[str, float] | None:
    """Mean milliseconds of each stage per target pass."""
    timed = [(row, row.stages) for row in rows if row.stages is not None]
    steps = sum((row.completion_tokens if arm is Arm.AR else row.verify_steps) or 0 for row, _ in timed)
    if not steps:
        return None
    return {stage: 1e3 * sum(getattr(stages, stage) for _, stages in timed) / steps for stage in STAGES}


def _latency(rows: Sequence[RequestRow]) -> Latency:
    gaps = [after - before for row in rows for before, after in pairwise(row.chunk_s)]
    later = [tokens for row in rows for tokens in row.chunk_tokens[1:]]
    return Latency(
        ttft=_quantiles([row.ttft_s for row in rows]),
        tpot=_quantiles([row.tpot_s for row in rows]),
        itl=_quantiles(gaps),
        tokens_per_chunk=sum(later) / len(later) if later else None,
    )


def _quantiles(values: Sequence[float | None]) -> Quantiles | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    median, p90 = np.quantile(known, [0.5, 0.9])
    return Quantiles(float(median), float(p90), max(known), len(known))
