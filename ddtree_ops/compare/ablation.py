"""Arm against arm at one budget, outside the verdicts: can ``shadow`` be trusted, what do leaks cost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from ddtree_ops.compare.frames import paired_sums
from ddtree_ops.compare.measures import Measures, column, differences
from ddtree_ops.compare.statistics import Bootstrap, Interval, Values
from ddtree_ops.compare.verdicts import Metric, baseline_for, paired_ratio
from ddtree_ops.schemas.arms import Arm


@dataclass(frozen=True)
class ShadowBias:
    """Shadow's estimate over what ``ddtree`` measured at that budget, like for like.

    Both are the mean of accepted drafts + 1 over steps, by histogram: unlike an accept length, that holds no
    token of the prefill and does not cut the last step at the request's end.
    """

    shadow: Measures
    tree: Measures
    measured: Interval
    ratio: Interval


@dataclass(frozen=True)
class Leak:
    """One cell of ``unsafe`` beside ``ddtree`` at its budget. Ratios are unsafe over ddtree, not verdicts."""

    unsafe: Measures
    tree: Measures | None
    prompts: int
    wrong: int
    first_difference: float | None
    pass_time: Interval | None
    accept_length: Interval | None


def shadow_biases(measures: Sequence[Measures], *, seed: int = 0) -> list[ShadowBias]:
    """Calibrate the estimate: 1 means that logged trees foretold what trees did."""
    biases = []
    for shadow in measures:
        if shadow.cell.arm is not Arm.SHADOW or shadow.shadow_estimate is None or not shadow.cell.complete:
            continue
        tree = _same_budget(shadow, measures)
        if tree is None or not tree.cell.complete:
            continue
        ours, theirs, prompts = paired_sums(shadow.frame, tree.frame)
        estimated = _rate(ours, "shadow_tokens", "shadow_steps")
        counted = _rate(theirs, "step_tokens", "counted_steps")
        bootstrap = Bootstrap(prompts, positions=len(ours), seed=seed)
        ratio, measured = bootstrap.ratio_of_rates(estimated, counted), bootstrap.ratio_of_sums(*counted)
        if ratio is not None and measured is not None:
            biases.append(ShadowBias(shadow, tree, measured, ratio))
    return biases


def leaks(measures: Sequence[Measures], *, seed: int = 0) -> list[Leak]:
    """What sharing recurrent states between siblings does to output, and the speed that forking gives up."""
    found = []
    for unsafe in measures:
        if unsafe.cell.arm is not Arm.UNSAFE:
            continue
        tree, reference = _same_budget(unsafe, measures), baseline_for(unsafe, measures, Arm.AR)
        places = differences(unsafe.cell, reference.cell) if reference is not None else {}
        wrong = [place for place in places.values() if place is not None]
        comparable = tree if tree is not None and tree.cell.complete and unsafe.cell.complete else None
        accept = pass_time = None
        if comparable is not None:
            accept = paired_ratio(unsafe.frame, comparable.frame, Metric.ACCEPT_LENGTH, seed=seed)
            pass_time = _pass_time(unsafe, comparable, seed)
        first = median(wrong) if wrong else None
        found.append(Leak(unsafe, tree, len(places), len(wrong), first, pass_time, accept))
    return found


def _pass_time(unsafe: Measures, tree: Measures, seed: int) -> Interval | None:
    """Request time per target pass: what forking costs apart from how many passes the outputs needed."""
    ours, theirs, prompts = paired_sums(unsafe.frame, tree.frame)
    return Bootstrap(prompts, positions=len(ours), seed=seed).ratio_of_rates(
        _rate(ours, "e2e_s", "target_steps"), _rate(theirs, "e2e_s", "target_steps")
    )


def _same_budget(item: Measures, measures: Sequence[Measures]) -> Measures | None:
    for other in measures:
        if other.cell.arm is Arm.DDTREE and _tree_of(other) == _tree_of(item):
            return other
    return None


def _tree_of(item: Measures) -> tuple[object, ...]:
    return item.cell.load, item.cell.budget, item.cell.builder


def _rate(parts: Mapping[int, pd.DataFrame], numerator: str, denominator: str) -> tuple[Values, Values]:
    return column(parts, numerator), column(parts, denominator)
