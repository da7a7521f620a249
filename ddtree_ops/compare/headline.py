"""One honest sentence about a run, made from its verdicts: a win, a loss, or that one can't tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.compare.analysis import Analysis
from ddtree_ops.compare.checks import failed_checks
from ddtree_ops.compare.load import Cell
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.verdicts import Answer, Metric, Verdict
from ddtree_ops.schemas.arms import Arm

CPU_NOTE = (
    "Tokens per second on this CPU engine are not the point: a CPU pays for every node of a tree, where a "
    "GPU verifies them in little more time than one. Tokens per target pass are what carries over."
)


@dataclass(frozen=True)
class Headline:
    """``claim`` is the one sentence; ``also`` are the second metric's and the warnings."""

    claim: str
    also: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join((self.claim, *self.also))


def headline(analysis: Analysis) -> Headline:
    """What the run says of ``ddtree`` against ``dflash``, first in the metric that carries over."""
    metrics = list(Metric) if analysis.on_cpu_engine else list(reversed(Metric))
    claims = [text for metric in metrics if (text := _sentence(analysis, metric))]
    if claims and (text := _against_plain_decoding(analysis)):
        claims.append(text)
    loads = len(analysis.results.loads())
    if loads > 1:
        claims += [text for metric in metrics if (text := _over_loads(analysis, metric, loads))]
    wrong = [name for name in failed_checks(analysis.checks) if name != "all_cells_complete"]
    warnings = [f"Checks that failed: {', '.join(wrong)}."] if wrong else []
    if not claims:
        return Headline(_nothing(analysis), tuple(warnings))
    return Headline(claims[0], (*claims[1:], *warnings))


def _sentence(analysis: Analysis, metric: Metric) -> str | None:
    best = next((item for item in analysis.best if item.metric is metric), None)
    if best is not None:
        return _claim(analysis, metric, best.cell, best.answer, best.ratio)
    for verdict in _of_trees(analysis):
        if verdict.metric is metric and verdict.ratio is not None:
            return _claim(analysis, metric, verdict.cell, verdict.answer, verdict.ratio)
    return None


def _against_plain_decoding(analysis: Analysis) -> str | None:
    """How the fastest tree stands against no speculation at all: beating the chain alone is no win."""
    metric = Metric.TOKENS_PER_SECOND
    best = next((item for item in analysis.best if item.metric is metric), None)
    trees = [best.cell] if best is not None else [verdict.cell for verdict in _of_trees(analysis)]
    for verdict in analysis.verdicts:
        if verdict.metric is not metric or verdict.baseline is not Arm.AR or verdict.cell not in trees:
            continue
        if verdict.ratio is None:
            continue
        figure = f"{verdict.ratio.value:.2f} times the tokens per second of ar ({verdict.cell.label})"
        if verdict.answer is Answer.FASTER:
            return f"Against plain decoding: {figure}."
        if verdict.answer is Answer.SLOWER:
            return f"Plain decoding is faster: the tree yields {figure}."
        return f"Against plain decoding it can't be told: {figure}."
    return None


def _over_loads(analysis: Analysis, metric: Metric, loads: int) -> str | None:
    answers = [item.answer for item in analysis.best if item.metric is metric]
    if not answers:
        return None
    counts = [f"{answers.count(answer)} {metric.word(answer)}" for answer in Answer if answer in answers]
    return f"Over {loads} load points, {metric.words} of the best tree against dflash: {', '.join(counts)}."


def _of_trees(analysis: Analysis) -> list[Verdict]:
    return [
        verdict
        for verdict in analysis.verdicts
        if verdict.cell.arm is Arm.DDTREE and verdict.baseline is Arm.DFLASH
    ]


def _claim(analysis: Analysis, metric: Metric, cell: Cell, answer: Answer, ratio: Interval) -> str:
    figure = f"{ratio.value:.2f} times"
    if ratio.low is not None and ratio.high is not None:
        details = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}, {cell.label}"
    else:
        details = f"{ratio.n} prompts, {cell.label}"
    if len(analysis.results.loads()) > 1:
        details += f" at {cell.load}"
    unit = "tokens per target pass" if metric is Metric.ACCEPT_LENGTH else "tokens per second"
    if answer is Answer.FASTER:
        return f"The tree yields {figure} the {unit} of dflash ({details})."
    if answer is Answer.SLOWER:
        return f"Even the best tree yields fewer {unit} than dflash: {figure} ({details})."
    return f"Whether the tree yields more {unit} than dflash can't be told: {figure} ({details})."


def _nothing(analysis: Analysis) -> str:
    arms = {item.cell.arm for item in analysis.measures}
    if Arm.DDTREE in arms and Arm.DFLASH not in arms and Arm.AR in arms:
        return _beside_plain_decoding(analysis)
    if Arm.DDTREE not in arms or Arm.DFLASH not in arms:
        return "This run does not compare ddtree with dflash: both arms are needed for that."
    return f"No verdict on ddtree against dflash: {'; '.join(_reasons(_of_trees(analysis)))}."


def _beside_plain_decoding(analysis: Analysis) -> str:
    """Every tree at the first load, none picked: without dflash there is no best budget to judge."""
    metric = Metric.ACCEPT_LENGTH if analysis.on_cpu_engine else Metric.TOKENS_PER_SECOND
    first = analysis.results.loads()[0]
    verdicts = [
        verdict
        for verdict in analysis.verdicts
        if verdict.cell.arm is Arm.DDTREE
        and verdict.baseline is Arm.AR
        and verdict.metric is metric
        and verdict.cell.load == first
    ]
    where = f" at {first}" if len(analysis.results.loads()) > 1 else ""
    if not any(verdict.ratio for verdict in verdicts):
        why = "; ".join(_reasons(verdicts)) or "no load that both were measured at"
        return f"No verdict on ddtree against ar, and no dflash in this run{where}: {why}."
    figures = [_beside(verdict, metric) for verdict in verdicts]
    return f"Against plain decoding, {metric.words}{where}: {'; '.join(figures)}. No dflash in this run."


def _beside(verdict: Verdict, metric: Metric) -> str:
    label, ratio = verdict.cell.label, verdict.ratio
    if ratio is None:
        return f"{label}: no verdict"
    ends = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{label} {ratio.value:.2f}{ends} times ar ({metric.word(verdict.answer)})"


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Each reason once, with the cells that it is true of in front."""
    cells: dict[str, list[str]] = {}
    for verdict in verdicts:
        label = verdict.cell.label
        own = verdict.reason.startswith(f"{label}: ")
        named = cells.setdefault(verdict.reason.removeprefix(f"{label}: "), [])
        if own and label not in named:
            named.append(label)
    return [f"{', '.join(named)}: {reason}" if named else reason for reason, named in cells.items()]
