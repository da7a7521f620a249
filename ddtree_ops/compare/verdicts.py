"""Faster, slower or can't tell, for every budget of ``shadow`` and ``ddtree`` against ``dflash`` and ``ar``.

Two metrics are judged: tokens per second, and accept length, which is tokens per target pass. A verdict
needs an interval that lies wholly on one side of 1, at least :data:`MIN_PROMPTS` paired prompts and
repeats that agree. ``unsafe`` gives wrong output and gets no verdict at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from ddtree_ops.compare.frames import by_prompt, paired_sums
from ddtree_ops.compare.load import Cell, Load
from ddtree_ops.compare.measures import Measures, column, lacks
from ddtree_ops.compare.parity import shortfall
from ddtree_ops.compare.statistics import MIN_PROMPTS, Bootstrap, Direction, Interval, direction, split_halves
from ddtree_ops.schemas.arms import Arm

BASELINES = (Arm.DFLASH, Arm.AR)
JUDGED = (Arm.DDTREE, Arm.SHADOW)

#: What must be equal for two cells to have done the same work.
SAME_WORK = (
    "concurrency",
    "temperature",
    "max_tokens",
    "ignore_eos",
    "seed",
    "dataset_sha256",
    "model_sha256",
    "engine",
    "dtype",
    "host_fingerprint",
)


class Metric(StrEnum):
    ACCEPT_LENGTH = "accept_length"
    TOKENS_PER_SECOND = "tokens_per_second"

    @property
    def columns(self) -> tuple[str, str]:
        """The summed columns whose ratio it is."""
        if self is Metric.ACCEPT_LENGTH:
            return "completion_tokens", "target_steps"
        return "completion_tokens", "e2e_s"

    @property
    def words(self) -> str:
        return "tokens per target pass" if self is Metric.ACCEPT_LENGTH else "tokens per second"

    def word(self, answer: Answer) -> str:
        """An answer in the metric's words: tokens per pass are more or fewer, only seconds make faster."""
        if self is Metric.ACCEPT_LENGTH:
            return {Answer.FASTER: "more", Answer.SLOWER: "fewer"}.get(answer, answer.value)
        return answer.value


class Answer(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    CANT_TELL = "can't tell"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Verdict:
    """One cell against one baseline in one metric. ``ratio`` is candidate over baseline."""

    cell: Cell
    baseline: Arm
    metric: Metric
    answer: Answer
    ratio: Interval | None
    reason: str


@dataclass(frozen=True)
class BestBudget:
    """How the best tree of a load fares where its budget was picked on other prompts.

    ``cell`` is the best over all prompts; ``picks`` are the best on either half, and ``ratio`` reads each on
    the half that it was not picked on.
    """

    load: Load
    metric: Metric
    cell: Cell
    candidates: tuple[str, ...]
    picks: tuple[str, str]
    ratio: Interval
    answer: Answer
    reason: str


def judge_all(measures: Sequence[Measures], *, seed: int = 0) -> list[Verdict]:
    """Every verdict of a run: ``ddtree`` before ``shadow``, cells in plan order, ``dflash`` before ``ar``."""
    verdicts = []
    candidates = [item for arm in JUDGED for item in measures if item.cell.arm is arm]
    for candidate in candidates:
        for arm in BASELINES:
            baseline = baseline_for(candidate, measures, arm)
            if baseline is not None:
                verdicts += [judge(candidate, baseline, metric, seed=seed) for metric in Metric]
    return verdicts


def baseline_for(candidate: Measures, measures: Sequence[Measures], arm: Arm) -> Measures | None:
    """The cell of ``arm`` at the candidate's load."""
    for other in measures:
        if other.cell.arm is arm and other.cell.load == candidate.cell.load:
            return other
    return None


def judge(candidate: Measures, baseline: Measures, metric: Metric, *, seed: int = 0) -> Verdict:
    """Judge one cell against one baseline."""

    def verdict(answer: Answer, ratio: Interval | None, reason: str) -> Verdict:
        return Verdict(candidate.cell, baseline.cell.arm, metric, answer, ratio, reason)

    obstacle = _obstacle(candidate, baseline)
    if obstacle is not None:
        return verdict(Answer.NO_VERDICT, None, obstacle)
    ratio = paired_ratio(candidate.frame, baseline.frame, metric, seed=seed)
    if ratio is None:
        return verdict(Answer.NO_VERDICT, None, f"the rows lack what {metric.words} needs")
    answer, reason = answer_for(ratio)
    if answer in {Answer.FASTER, Answer.SLOWER}:
        contrary = _contrary_repeats(candidate.frame, baseline.frame, metric, ratio)
        if contrary:
            return verdict(Answer.CANT_TELL, ratio, contrary)
    return verdict(answer, ratio, reason)


def paired_ratio(
    candidate: pd.DataFrame, baseline: pd.DataFrame, metric: Metric, *, seed: int = 0
) -> Interval | None:
    """Candidate's rate over the baseline's, over the prompts that both answered, paired by position, too."""
    ours, theirs, prompts = paired_sums(candidate, baseline)
    top, bottom = metric.columns
    if not prompts or any(lacks(part, top, bottom) for part in (*ours.values(), *theirs.values())):
        return None
    return Bootstrap(prompts, positions=len(ours), seed=seed).ratio_of_rates(
        (column(ours, top), column(ours, bottom)), (column(theirs, top), column(theirs, bottom))
    )


def answer_for(ratio: Interval) -> tuple[Answer, str]:
    """The answer that a ratio's interval gives, with the reason."""
    if not ratio.known:
        return Answer.CANT_TELL, f"only {ratio.n} prompts of the {MIN_PROMPTS} that an interval needs"
    if ratio.low == ratio.high == 1.0:
        return Answer.CANT_TELL, "equal on every prompt"
    side = direction(ratio)
    if side is Direction.FASTER:
        return Answer.FASTER, "interval above 1"
    if side is Direction.SLOWER:
        return Answer.SLOWER, "interval below 1"
    return Answer.CANT_TELL, "interval holds 1"


def best_budgets(measures: Sequence[Measures], *, seed: int = 0) -> list[BestBudget]:
    """For each load and metric: the best ``ddtree`` cell against ``dflash`` without the winner's curse.

    The largest of several noisy ratios is too large on average. So the best is picked on each half of the
    prompts and read on the other half, and the two readings make one ratio over all prompts. None is given
    where fewer than two cells are usable.
    """
    found = []
    for load in sorted({item.cell.load for item in measures}):
        here = [item for item in measures if item.cell.load == load]
        for metric in Metric:
            best = _best_budget(load, here, metric, seed)
            if best is not None:
                found.append(best)
    return found


def _best_budget(load: Load, measures: Sequence[Measures], metric: Metric, seed: int) -> BestBudget | None:
    chain = next((item for item in measures if item.cell.arm is Arm.DFLASH and item.cell.complete), None)
    if chain is None:
        return None
    trees = [item for item in measures if item.cell.arm is Arm.DDTREE and _obstacle(item, chain) is None]
    prompts = sorted(by_prompt(chain.frame).index)
    first, second = ({prompts[index] for index in half} for half in split_halves(len(prompts), seed))
    picks = _best_on(first, trees, chain, metric), _best_on(second, trees, chain, metric)
    best = _best_on(set(prompts), trees, chain, metric)
    if len(trees) < 2 or picks[0] is None or picks[1] is None or best is None:
        return None
    unseen = pd.concat([_rows_of(picks[0], second), _rows_of(picks[1], first)])
    ratio = paired_ratio(unseen, chain.frame, metric, seed=seed)
    if ratio is None:
        return None
    answer, reason = answer_for(ratio)
    return BestBudget(
        load=load,
        metric=metric,
        cell=best.cell,
        candidates=tuple(item.cell.label for item in trees),
        picks=(picks[0].cell.label, picks[1].cell.label),
        ratio=ratio,
        answer=answer,
        reason=reason,
    )


def _best_on(
    prompts: set[str], trees: Sequence[Measures], chain: Measures, metric: Metric
) -> Measures | None:
    scored = [
        (ratio.value, item)
        for item in trees
        if (ratio := paired_ratio(_rows_of(item, prompts), _rows_of(chain, prompts), metric)) is not None
    ]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _rows_of(measures: Measures, prompts: set[str]) -> pd.DataFrame:
    return measures.frame[measures.frame["prompt_id"].isin(prompts)]


def _obstacle(candidate: Measures, baseline: Measures) -> str | None:
    """Why the two may not be compared; None where they may."""
    if candidate.cell.arm is Arm.UNSAFE or baseline.cell.arm is Arm.UNSAFE:
        return "unsafe gives wrong output and is never judged"
    for item in (candidate, baseline):
        record = item.cell.record
        if not item.cell.complete:
            return f"{item.cell.label} is {record.state.value}: {record.reason or 'no reason was recorded'}"
        failed = len(item.cell.rows) - len(item.cell.ok_rows)
        if failed:
            return f"{item.cell.label}: {failed} of {len(item.cell.rows)} requests failed"
        if item.unstable and item.cell.spec.dtype == "float32":
            return f"{item.cell.label}: greedy output of {item.unstable} prompts changes between repeats"
    for name in SAME_WORK:
        ours, theirs = getattr(candidate.cell.spec, name), getattr(baseline.cell.spec, name)
        if ours != theirs:
            return f"{name} differs: {ours} against {theirs}"
    for item in (candidate, baseline):
        parity = item.parity(Arm.AR) or item.parity(Arm.DFLASH)
        if item.cell.spec.temperature == 0 and parity is not None and (short := shortfall(parity)):
            return f"{item.cell.label}: {short}"
    return None


def _contrary_repeats(
    candidate: pd.DataFrame, baseline: pd.DataFrame, metric: Metric, ratio: Interval
) -> str | None:
    """Resampling prompts can't see what changes between repeats, so each must point the same way.

    Where each repeat has a position of its own, the interval holds what changes between them.
    """
    if ratio.positions > 1:
        return None
    repeats = sorted(set(candidate["repeat"]) & set(baseline["repeat"]))
    if len(repeats) < 2:
        return None
    for repeat in repeats:
        alone = paired_ratio(
            candidate[candidate["repeat"] == repeat], baseline[baseline["repeat"] == repeat], metric
        )
        if alone is not None and (alone.value > 1) != (ratio.value > 1):
            return f"the repeats disagree: repeat {repeat + 1} alone gives {alone.value:.2f}"
    return None
