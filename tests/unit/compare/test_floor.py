"""The A/A floor: what one service differs from itself by, and the verdicts that it takes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.floor import Floor
from ddtree_ops.compare.report import render
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.summary import summarise
from ddtree_ops.compare.verdicts import Answer, Metric, Verdict
from ddtree_ops.schemas.arms import Arm
from tests.support.make_store import make_store

#: A tree's gain in tokens per second that one start of each arm shows clearly, and that starts differ by.
RUN: dict[str, Any] = {
    "arms": ("dflash", "ddtree"),
    "budgets": [31],
    "noise": 0.01,
    "node_ms": 0.02,
    "run_id": "2-run",
}
AA: dict[str, Any] = {"arms": ("dflash",), "positions": 2, "noise": 0.01, "run_id": "1-aa"}


def store(path: Path, *, start_noise: float = 1.0, **changes: Any) -> Path:
    """A run of one start of each arm, after an A/A of dflash whose `changes` are given."""
    make_store(path, **AA, start_noise=start_noise, **changes)
    return make_store(path, **RUN)


def verdict(analysis: Analysis, metric: Metric) -> Verdict:
    (found,) = [one for one in analysis.verdicts if one.baseline is Arm.DFLASH and one.metric is metric]
    return found


def floor(analysis: Analysis, metric: Metric = Metric.TOKENS_PER_SECOND) -> Floor:
    (found,) = [one for one in analysis.floors if one.metric is metric]
    return found


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyse(store(tmp_path_factory.mktemp("noisy") / "s"))


def test_the_floor_holds_the_starts_that_differ_either_way_round(noisy: Analysis) -> None:
    found = floor(noisy)
    assert found.cell.arm is Arm.DFLASH
    assert found.positions == 2
    assert found.low == pytest.approx(1 / found.high)
    assert found.ratio.low is not None
    assert found.ratio.high is not None
    assert found.low <= found.ratio.low < found.ratio.high <= found.high
    assert found.high > 1.1
    assert floor(noisy, Metric.ACCEPT_LENGTH).high == 1  # greedy: the same tokens at every start


def test_a_verdict_within_the_floor_tells_nothing_and_one_beyond_it_stands(
    noisy: Analysis, tmp_path: Path
) -> None:
    alone = analyse(make_store(tmp_path / "alone", **RUN))
    before = verdict(alone, Metric.TOKENS_PER_SECOND)
    assert before.answer in {Answer.FASTER, Answer.SLOWER}
    after = verdict(noisy, Metric.TOKENS_PER_SECOND)
    assert (after.answer, after.ratio) == (Answer.CANT_TELL, before.ratio)
    assert "within the A/A floor: dflash against itself" in after.reason
    assert verdict(noisy, Metric.ACCEPT_LENGTH).answer is Answer.FASTER
    quiet = analyse(store(tmp_path / "quiet", start_noise=0.001))
    assert verdict(quiet, Metric.TOKENS_PER_SECOND).answer is before.answer


@pytest.mark.parametrize("change", [{"host": "host-b"}, {"concurrencies": [4]}, {"engine_version": "0.2.0"}])
def test_a_floor_of_another_machine_load_or_engine_says_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    found = analyse(store(tmp_path / "s", **change))
    assert found.floors == ()
    assert verdict(found, Metric.TOKENS_PER_SECOND).answer is not Answer.CANT_TELL


def test_a_floor_without_neighbours_says_nothing_of_services_side_by_side(noisy: Analysis) -> None:
    found = floor(noisy)
    alone = next(item.cell.spec for item in noisy.measures if item.cell.arm is Arm.DDTREE)
    assert found.covers(alone)
    assert not found.covers(alone.model_copy(update={"beside": ["1 x dflash"]}))


def test_an_a_a_that_is_no_result_or_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    path = store(tmp_path / "s", invalid={("dflash", None): "the card was throttled"})
    assert analyse(path).floors == ()
    (path / "cells" / "broken").mkdir()
    (path / "cells" / "broken" / "cell.json").write_text("{")
    assert analyse(path).floors == ()


@pytest.mark.parametrize(
    ("ratio", "held"),
    [
        (Interval(1.02, 0.96, 1.04, 10), True),
        (Interval(1.02, 1.01, 1.06, 10), False),
        (Interval(0.96, 0.94, 0.99, 10), False),
        (Interval(1.02, None, None, 4), False),
        (Interval(1.02, 1.01, 1.04, 10, positions=2), False),
    ],
    ids=["within", "above", "below", "not known", "over several starts"],
)
def test_only_a_whole_interval_of_one_start_within_the_floor_is_held(
    noisy: Analysis, ratio: Interval, held: bool
) -> None:
    narrow = Floor(floor(noisy).cell, Metric.TOKENS_PER_SECOND, 2, Interval(1.01, 0.97, 1.05, 10), 0.95, 1.05)
    assert narrow.holds(ratio) is held


def test_the_report_and_the_summary_show_the_floor_beside_the_verdicts(noisy: Analysis) -> None:
    page = render(noisy)
    assert "A/A: the same service against itself, start by start" in page
    assert f"{floor(noisy).low:.3f} to {floor(noisy).high:.3f}" in page
    floors = {one["metric"]: one for one in summarise(noisy)["floors"]}
    assert floors["tokens_per_second"]["high"] == floor(noisy).high
    assert "floor" in floor(noisy).text
