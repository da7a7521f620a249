"""Cells of several positions: intervals that hold what changes from one start of a service to the next."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.frames import by_position, by_prompt
from ddtree_ops.compare.report import render
from ddtree_ops.compare.statistics import Bootstrap, Interval, position_stretch, student_quantile
from ddtree_ops.compare.verdicts import Answer, Metric, Verdict, judge, paired_ratio
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellRecord
from tests.support.make_store import make_store

ARMS = ("dflash", "ddtree")
ONE_START = "what changes from one start to the next is not in the intervals"


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Four starts that differ by nothing but the noise of requests."""
    folder = tmp_path_factory.mktemp("steady") / "s"
    return analyse(make_store(folder, arms=ARMS, budgets=[31], positions=4, noise=0.01))


def ends(interval: Interval | None) -> tuple[float, float, float]:
    """Low, value, high of an interval that is known."""
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.value, interval.high


def verdict(analysis: Analysis, metric: Metric, label: str = "ddtree 31") -> Verdict:
    return next(
        one
        for one in analysis.verdicts
        if one.cell.label == label and one.baseline is Arm.DFLASH and one.metric is metric
    )


@pytest.mark.parametrize("positions", [2, 3, 8])
def test_the_interval_of_a_ratio_covers_the_truth_over_all_starts(positions: int) -> None:
    """Two arms with the same speed, whose every start is off by 5 %; prompts alone would say 1 %."""
    rng = np.random.default_rng(positions)
    trials, prompts, hits, alone = 400, 12, 0, 0
    for trial in range(trials):
        tokens = np.full((positions, prompts), 96.0)
        hard = rng.lognormal(0, 0.3, prompts)
        ours, theirs = (
            hard * rng.lognormal(0, 0.05, (positions, 1)) * rng.lognormal(0, 0.01, (positions, prompts))
            for _ in range(2)
        )
        pooled = Bootstrap(prompts, seed=trial, resamples=600).ratio_of_rates(
            (tokens.sum(0), ours.sum(0)), (tokens.sum(0), theirs.sum(0))
        )
        ratio = Bootstrap(prompts, positions=positions, seed=trial, resamples=600).ratio_of_rates(
            (tokens, ours), (tokens, theirs)
        )
        low, value, high = ends(ratio)
        pooled_low, pooled_value, pooled_high = ends(pooled)
        assert value == pytest.approx(pooled_value)
        hits += low <= 1 <= high
        alone += pooled_low <= 1 <= pooled_high
    assert hits / trials >= 0.91
    assert alone / trials <= 0.5


def test_positions_that_agree_leave_what_prompts_alone_give() -> None:
    rng = np.random.default_rng(0)
    tokens, steps = np.full(10, 96.0), rng.gamma(4, 8, 10)
    alone = Bootstrap(10, seed=1).ratio_of_sums(tokens, steps)
    agreeing = Bootstrap(10, positions=4, seed=1).ratio_of_sums([tokens] * 4, [steps] * 4)
    assert ends(agreeing) == pytest.approx(ends(alone))
    assert alone is not None
    assert agreeing is not None
    assert (alone.positions, agreeing.positions) == (1, 4)


def test_one_position_is_what_it_was_before_there_were_several() -> None:
    tokens, steps = [float(n) for n in range(1, 9)], [float(n) for n in range(8, 0, -1)]
    assert Bootstrap(8, seed=3).ratio_of_sums(tokens, steps) == Bootstrap(8, seed=3).ratio_of_sums(
        [tokens], [steps]
    )


def test_what_makes_a_prompt_hard_does_not_average_out_over_positions() -> None:
    """Ten starts of one prompt tell as little of other prompts as one does."""
    rng = np.random.default_rng(5)
    tokens, steps = np.full(10, 96.0), rng.gamma(2, 20, 10)
    once = Bootstrap(10, seed=1).ratio_of_sums(tokens, steps)
    noise = rng.lognormal(0, 1e-6, (10, 10))
    often = Bootstrap(10, positions=10, seed=1).ratio_of_sums([tokens] * 10, steps * noise)
    assert ends(often) == pytest.approx(ends(once), rel=1e-3)


def test_a_position_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="6 prompts at 2 positions"):
        Bootstrap(6, positions=2).ratio_of_sums([[1.0] * 6], [[1.0] * 6])


@pytest.mark.parametrize("positions", [2, 3, 5, 8])
def test_draws_of_few_positions_are_stretched_by_student_s_quantile(positions: int) -> None:
    wanted = np.sqrt(positions / (positions - 1)) * stats.t.ppf(0.975, positions - 1) / stats.norm.ppf(0.975)
    assert position_stretch(positions) == pytest.approx(wanted, rel=0.01)
    assert position_stretch(1) == 1
    assert student_quantile(0.975, 1) == pytest.approx(stats.t.ppf(0.975, 1))


def test_starts_that_differ_take_a_verdict_back_that_prompts_alone_would_give(tmp_path: Path) -> None:
    """The accept length is the same at every start, so its verdict stands."""
    noisy = analyse(make_store(tmp_path / "s", arms=ARMS, budgets=[31], positions=3, start_noise=0.25))
    found = verdict(noisy, Metric.TOKENS_PER_SECOND)
    assert found.answer is Answer.CANT_TELL
    assert found.ratio is not None
    assert found.ratio.positions == 3
    low, _, high = ends(found.ratio)
    tree, chain = (frame.assign(position=0) for frame in frames(noisy))
    alone_low, _, alone_high = ends(paired_ratio(tree, chain, Metric.TOKENS_PER_SECOND))
    assert high / low > 1.5 * alone_high / alone_low
    assert verdict(noisy, Metric.ACCEPT_LENGTH).answer is Answer.FASTER


def frames(analysis: Analysis) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tree's requests and the chain's."""
    by_label = {one.cell.label: one.frame.copy() for one in analysis.measures}
    return by_label["ddtree 31"], by_label["dflash"]


def test_arms_are_paired_by_position(steady: Analysis) -> None:
    """A card that slows both arms alike cancels: their ratio is as narrow as without it."""
    tree, chain = frames(steady)
    low, _, high = ends(paired_ratio(tree, chain, Metric.TOKENS_PER_SECOND))
    slow = {0: 1.0, 1: 1.4, 2: 0.7, 3: 2.0}
    for frame in (tree, chain):
        frame["e2e_s"] *= frame["position"].map(slow)
    slowed_low, _, slowed_high = ends(paired_ratio(tree, chain, Metric.TOKENS_PER_SECOND))
    assert slowed_high - slowed_low < 1.5 * (high - low)


def test_positions_need_not_agree_one_by_one(steady: Analysis) -> None:
    """Where repeats share a start, one that points the other way takes a verdict back; an interval that holds
    what changes between starts needs no such rule.
    """
    tree = next(one for one in steady.measures if one.cell.label == "ddtree 31")
    chain = next(one for one in steady.measures if one.cell.arm is Arm.DFLASH)
    other_way = tree.frame.copy()
    other_way.loc[other_way["position"] == 3, "e2e_s"] *= 2.0
    other_way.loc[other_way["position"] != 3, "e2e_s"] *= 0.4
    several = judge(replace(tree, frame=other_way), chain, Metric.TOKENS_PER_SECOND)
    assert "repeats disagree" not in several.reason
    ours, theirs = other_way.assign(position=0), chain.frame.assign(position=0)
    one = judge(replace(tree, frame=ours), replace(chain, frame=theirs), Metric.TOKENS_PER_SECOND)
    assert "repeats disagree" in one.reason


def test_an_unfinished_cell_is_shown_over_all_it_has(tmp_path: Path) -> None:
    analysis = analyse(make_store(tmp_path / "s", arms=("dflash",), positions=2, prompts=6))
    frame = analysis.measures[0].frame
    assert list(by_position(frame)) == [0, 1]
    ragged = frame[(frame["position"] == 0) | (frame["prompt_index"] < 2)]
    assert list(by_position(ragged)) == [0]
    assert by_position(ragged)[0].equals(by_prompt(ragged))


def test_the_report_says_what_starts_it_covers(tmp_path: Path) -> None:
    one = render(analyse(make_store(tmp_path / "one", arms=ARMS, budgets=[31], prompts=6)))
    assert ONE_START in one
    assert "Tokens per second at each start" not in one
    moved = render(analyse(make_store(tmp_path / "moved", arms=ARMS, budgets=[31], prompts=6, positions=3)))
    assert ONE_START not in moved
    assert "once at each of 3 positions" in moved
    assert "Tokens per second at each start of the service" in moved
    assert "host-a/GPU-00000002" in moved


def test_a_cell_that_did_not_move_has_the_key_that_it_had_before_cells_could() -> None:
    """Stores from before are read by their keys: the hash is over the same fields."""
    folder = Path(__file__).parents[3] / "results" / "cpu-quickstart" / "results" / "cells"
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*/cell.json"))]
    assert records
    for record in records:
        record["spec"].pop("rotation", None)
        assert CellRecord.model_validate(record).spec.key() == record["key"]
