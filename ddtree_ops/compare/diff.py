"""Two runs, cell by cell: what changed in their specs, and whether the numbers did.

Runs of different times are not interleaved: accept lengths compare well, seconds carry whatever else
changed on the machine in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.compare.analysis import SEED
from ddtree_ops.compare.load import Cell, Results, load_results
from ddtree_ops.compare.measures import Measures, first_difference, measure, outputs_by_request
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.verdicts import Answer, Metric, answer_for, paired_ratio
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm

#: Cells of two runs belong together where these are equal.
SAME_CELL = ("arm", "budget", "concurrency", "temperature")
#: And can be paired prompt by prompt where these are.
SAME_PROMPTS = ("dataset_sha256", "max_tokens", "ignore_eos")


@dataclass(frozen=True)
class MetricDiff:
    """``ratio`` is B over A; None where no verdict could be given."""

    metric: Metric
    a: Interval | None
    b: Interval | None
    ratio: Interval | None
    answer: Answer
    reason: str


@dataclass(frozen=True)
class CellDiff:
    """One cell in both runs. ``changed`` maps a field of the spec to its two values."""

    a: Cell
    b: Cell
    changed: dict[str, tuple[Any, Any]]
    metrics: tuple[MetricDiff, ...]
    same_outputs: int
    outputs: int


@dataclass(frozen=True)
class DiffResult:
    """``only_a`` and ``only_b`` are cells without a counterpart."""

    run_a: str
    run_b: str
    cells: tuple[CellDiff, ...]
    only_a: tuple[Cell, ...]
    only_b: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "schema": 1,
            "a": self.run_a,
            "b": self.run_b,
            "cells": [_cell_json(item) for item in self.cells],
            "only_a": [cell.label for cell in self.only_a],
            "only_b": [cell.label for cell in self.only_b],
        }


def diff_results(a: Path, b: Path, *, run_a: str | None = None, run_b: str | None = None) -> DiffResult:
    """Compare two runs (default: each store's latest); A is before, B is after.

    Raises:
        BadInput: a store can't be read.
    """
    before, after = load_results(a, run_a), load_results(b, run_b)
    pairs = _pair(before, after)
    paired_a = {id(first) for first, _ in pairs}
    paired_b = {id(second) for _, second in pairs}
    return DiffResult(
        run_a=before.run.run_id,
        run_b=after.run.run_id,
        cells=tuple(_diff(first, second) for first, second in pairs),
        only_a=tuple(cell for cell in before.cells if id(cell) not in paired_a),
        only_b=tuple(cell for cell in after.cells if id(cell) not in paired_b),
    )


def show_diff(result: DiffResult, out: Output) -> None:
    """Print a difference as a table, what changed in the specs, and the JSON object."""
    for number, metric in enumerate(Metric):
        title = f"{metric.words}: {result.run_a} (A), {result.run_b} (B)"
        rows = [_row(item, item.metrics[number]) for item in result.cells]
        out.table(title, ("arm", "load", "A", "B", "B / A", "verdict", "same outputs"), rows)
    for field, values in _changes(result.cells).items():
        out.line(f"{field}: {values}")
    for name, cells in (("A", result.only_a), ("B", result.only_b)):
        if cells:
            out.line(f"only in {name}: {', '.join(cell.label for cell in cells)}")
    out.note("The runs were not interleaved: seconds also carry what else changed on the machine.")
    out.result(result.to_json(), summary=_summary(result))


def _pair(before: Results, after: Results) -> list[tuple[Cell, Cell]]:
    """Cells of A with those of B, each used once; of several candidates, the one with the fewest changes."""
    free = list(after.cells)
    pairs = []
    for cell in before.cells:
        candidates = [other for other in free if all(_field(cell, n) == _field(other, n) for n in SAME_CELL)]
        if candidates:
            best = min(candidates, key=lambda other: len(_changed(cell, other)))
            free.remove(best)
            pairs.append((cell, best))
    return pairs


def _diff(a: Cell, b: Cell) -> CellDiff:
    first, second = measure(a, seed=SEED), measure(b, seed=SEED)
    ours, theirs = outputs_by_request(b), outputs_by_request(a)
    common = ours.keys() & theirs.keys()
    same = sum(first_difference(ours[request], theirs[request]) is None for request in common)
    metrics = tuple(_metric(first, second, metric) for metric in Metric)
    return CellDiff(a, b, _changed(a, b), metrics, same, len(common))


def _metric(a: Measures, b: Measures, metric: Metric) -> MetricDiff:
    figures = (
        (a.accept_length, b.accept_length)
        if metric is Metric.ACCEPT_LENGTH
        else (a.tokens_per_second, b.tokens_per_second)
    )
    obstacle = _obstacle(a.cell, b.cell)
    ratio = None if obstacle else paired_ratio(b.frame, a.frame, metric, seed=SEED)
    if ratio is None:
        return MetricDiff(
            metric, *figures, None, Answer.NO_VERDICT, obstacle or "the rows lack what it needs"
        )
    return MetricDiff(metric, *figures, ratio, *answer_for(ratio))


def _obstacle(a: Cell, b: Cell) -> str | None:
    if a.arm is Arm.UNSAFE:
        return "unsafe gives wrong output"
    for name, cell in (("A", a), ("B", b)):
        if not cell.complete:
            return f"{name} is {cell.record.state.value}: {cell.record.reason or 'no reason was recorded'}"
    for field in SAME_PROMPTS:
        if _field(a, field) != _field(b, field):
            return f"{field} differs: the prompts can't be paired"
    return None


def _changed(a: Cell, b: Cell) -> dict[str, tuple[Any, Any]]:
    before, after = a.spec.model_dump(mode="json"), b.spec.model_dump(mode="json")
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _field(cell: Cell, name: str) -> Any:
    return getattr(cell.spec, name)


def _changes(cells: Sequence[CellDiff]) -> dict[str, str]:
    """Field -> what it was and is, with the number of cells where it changed so."""
    counts: dict[str, dict[str, int]] = {}
    for item in cells:
        for name, (before, after) in item.changed.items():
            text = f"{_short(before)} -> {_short(after)}"
            counts.setdefault(name, {}).setdefault(text, 0)
            counts[name][text] += 1
    return {
        name: "; ".join(f"{text} ({number} of {len(cells)} cells)" for text, number in texts.items())
        for name, texts in counts.items()
    }


def _short(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _row(item: CellDiff, metric: MetricDiff) -> tuple[str, ...]:
    digits = 2 if metric.metric is Metric.ACCEPT_LENGTH else 1
    load = f"C{item.a.spec.concurrency} T{item.a.spec.temperature:g}"
    same = f"{item.same_outputs} of {item.outputs}"
    verdict = metric.metric.word(metric.answer) if metric.ratio else f"{metric.answer.value}: {metric.reason}"
    return (
        item.a.label,
        load,
        _value(metric.a, digits),
        _value(metric.b, digits),
        _ratio(metric),
        verdict,
        same,
    )


def _ratio(metric: MetricDiff) -> str:
    ratio = metric.ratio
    if ratio is None:
        return "?"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _summary(result: DiffResult) -> str:
    parts = []
    for number, metric in enumerate(Metric):
        answers = [item.metrics[number].answer for item in result.cells]
        counts = [f"{answers.count(answer)} {metric.word(answer)}" for answer in Answer if answer in answers]
        parts.append(f"{metric.words}: {', '.join(counts) or 'no cell in both runs'}")
    return "B against A, " + "; ".join(parts)


def _value(interval: Interval | None, digits: int) -> str:
    return "?" if interval is None else f"{interval.value:.{digits}f}"


def _name(cell: Cell) -> str:
    return cell.label


def _cell_json(item: CellDiff) -> dict[str, Any]:
    return {
        "arm": item.a.arm.value,
        "budget": item.a.budget,
        "concurrency": item.a.spec.concurrency,
        "temperature": item.a.spec.temperature,
        "changed": {name: {"a": before, "b": after} for name, (before, after) in item.changed.items()},
        "same_outputs": item.same_outputs,
        "outputs": item.outputs,
        "metrics": {
            metric.metric.value: {
                "a": metric.a.value if metric.a else None,
                "b": metric.b.value if metric.b else None,
                "ratio": metric.ratio.value if metric.ratio else None,
                "low": metric.ratio.low if metric.ratio else None,
                "high": metric.ratio.high if metric.ratio else None,
                "verdict": metric.answer.value,
                "reason": metric.reason,
            }
            for metric in item.metrics
        },
    }
