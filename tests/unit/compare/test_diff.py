"""Two runs side by side: what changed, and whether the numbers did."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ddtree_ops.compare.diff import DiffResult, diff_results, show_diff
from ddtree_ops.compare.verdicts import Answer
from ddtree_ops.output import Output, OutputMode
from tests.support.make_store import make_store

ARMS = ("ar", "dflash", "ddtree", "unsafe")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("diff") / "a", arms=ARMS)


def answers(result: DiffResult, label: str) -> list[Answer]:
    return [metric.answer for cell in result.cells if cell.a.label == label for metric in cell.metrics]


def test_a_store_against_itself_changes_nothing(before: Path) -> None:
    result = diff_results(before, before)
    assert len(result.cells) == 7
    assert all(cell.changed == {} for cell in result.cells)
    assert all(cell.same_outputs == cell.outputs == 10 for cell in result.cells)
    assert {
        answer
        for cell in result.cells
        if cell.a.label != "unsafe 31"
        for answer in answers(result, cell.a.label)
    } == {Answer.CANT_TELL}


def test_a_new_engine_that_is_faster_is_seen_and_named(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, engine_version="0.2.0", pass_ms=5.0)
    result = diff_results(before, after)
    assert answers(result, "ddtree 31") == [Answer.CANT_TELL, Answer.FASTER]
    assert result.cells[0].changed == {"engine_version": ("0.1.0", "0.2.0")}
    assert answers(diff_results(after, before), "ddtree 31")[1] is Answer.SLOWER


def test_a_lower_accept_length_is_seen(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, gain=0.2)
    assert answers(diff_results(before, after), "ddtree 63")[0] is Answer.SLOWER


def test_unsafe_is_shown_but_never_judged(before: Path) -> None:
    assert answers(diff_results(before, before), "unsafe 31") == [Answer.NO_VERDICT, Answer.NO_VERDICT]


def test_other_prompts_or_lengths_can_not_be_paired(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, max_tokens=48)
    result = diff_results(before, after)
    assert answers(result, "dflash") == [Answer.NO_VERDICT, Answer.NO_VERDICT]
    assert "max_tokens differs" in result.cells[1].metrics[0].reason


def test_a_failed_cell_gets_no_verdict(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, failed={("ddtree", 15): "out of memory"})
    result = diff_results(before, after)
    assert answers(result, "ddtree 15") == [Answer.NO_VERDICT, Answer.NO_VERDICT]
    assert "out of memory" in json.dumps(result.to_json())


def test_cells_without_a_counterpart_are_listed(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=("ar", "shadow"), budgets=(31,))
    result = diff_results(before, after)
    assert [cell.label for cell in result.only_b] == ["shadow 31"]
    assert "dflash" in [cell.label for cell in result.only_a]


def test_another_builder_is_a_change_and_not_another_cell(before: Path, tmp_path: Path) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, builder="spine-first")
    tree = next(cell for cell in diff_results(before, after).cells if cell.a.label == "ddtree 63")
    assert tree.changed["builder"] == ("best-first", "spine-first")


def test_two_runs_of_one_store_can_be_compared(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("dflash",), run_id="r1")
    make_store(path, arms=("dflash",), run_id="r2", engine_version="0.2.0")
    result = diff_results(path, path, run_a="r1", run_b="r2")
    assert (result.run_a, result.run_b) == ("r1", "r2")
    assert "engine_version" in result.cells[0].changed


@pytest.mark.parametrize("mode", list(OutputMode))
def test_a_difference_is_shown_in_every_mode(before: Path, tmp_path: Path, mode: OutputMode) -> None:
    after = make_store(tmp_path / "b", arms=ARMS, engine_version="0.2.0", pass_ms=5.0)
    stdout, stderr = io.StringIO(), io.StringIO()
    show_diff(diff_results(before, after), Output(mode, stdout=stdout, stderr=stderr))
    printed = stdout.getvalue()
    if mode is OutputMode.JSON:
        last = json.loads(printed.splitlines()[-1])
        assert last["event"] == "result"
        assert last["cells"][0]["changed"] == {"engine_version": {"a": "0.1.0", "b": "0.2.0"}}
    else:
        assert "tokens per second: " in printed
    if mode is OutputMode.HUMAN:
        assert "engine_version: 0.1.0 -> 0.2.0 (7 of 7 cells)" in printed
        assert "not interleaved" in stderr.getvalue()
