"""Sweeps whose services change places between repeats: real processes, started anew for each position."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.config import load_sweep
from ddtree_ops.bench.plan import cell_name
from ddtree_ops.bench.runner import SweepOutcome
from ddtree_ops.bench.sweep import describe, prepare, show_plan
from ddtree_ops.errors import Interrupted, JobFailed
from ddtree_ops.output import Output
from ddtree_ops.schemas.results import CellRecord, CellState, RequestRow
from tests.support.ops import stub_sweep
from tests.support.rotation import ProcessMover, Rotator, rotating_plan

PROMPTS = 2


def rotator_of(folder: Path, *faults: str, positions: int = 2, **changes: Any) -> Rotator:
    sweep = stub_sweep(folder, *faults, prompts=PROMPTS, repeats=positions, max_tokens=8, **changes)
    return Rotator(folder, sweep)


def cells(outcome: SweepOutcome) -> dict[str, CellRecord]:
    return {cell_name(cell.spec): cell for cell in outcome.cells}


def by_position(rows: list[RequestRow]) -> dict[int, int]:
    return dict(Counter(row.position for row in rows))


def full(positions: int) -> dict[int, int]:
    return dict.fromkeys(range(positions), PROMPTS)


def test_all_positions_of_an_arm_are_one_cell_and_each_is_a_fresh_start(tmp_path: Path) -> None:
    rotator = rotator_of(tmp_path, positions=3)
    mover = ProcessMover()
    done = rotator(mover)
    assert mover.moves == [1, 2]  # the first position is where the services stand
    for name, cards in (("ar", "012"), ("ddtree 7", "120")):
        cell = cells(done)[name]
        assert cell.state is CellState.COMPLETE, cell.reason
        rows = rotator.store.rows(cell.key)
        assert by_position(rows) == full(3)
        assert all(row.repeat == row.position for row in rows)
        places = {row.position: row.place for row in rows}
        assert places == {number: f"here/card-{card}" for number, card in enumerate(cards)}
        assert cell.spec.rotation is not None
        assert cell.spec.rotation.places == ["here/card-0", "here/card-1", "here/card-2"]
    for service in ("ar", "ddtree"):
        assert len(set(rotator.starts.pids(service))) == 3
    mover = ProcessMover(at=2)
    again = rotator(mover)
    assert (len(again.reused), mover.moves, rotator.starts.made) == (2, [], [])
    # One that can't move at all takes new cells along, and no sealed one.
    rotator_of(tmp_path, positions=3, budgets=[7, 15])
    more = rotator(ProcessMover(at=2, troubles={0: JobFailed("no host is left to work on")}))
    assert cells(more)["ddtree 15"].state is CellState.FAILED
    assert "position 1: no host is left" in str(cells(more)["ddtree 15"].reason)
    assert {name: cells(more)[name] for name in cells(done)} == cells(done)


def test_which_card_is_first_is_no_part_of_a_cell_but_the_set_of_cards_is(tmp_path: Path) -> None:
    rotator = rotator_of(tmp_path, positions=3)

    def keys(cards: list[str]) -> list[str]:
        return [cell.key for cell in rotating_plan(rotator.file, cards).cells]

    three = keys(["a", "b", "c"])
    assert three == keys(["b", "c", "a"])
    assert not set(three) & set(keys(["a", "b", "d"]))


def test_a_plan_shows_where_services_will_be_and_counts_the_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rotator = rotator_of(tmp_path, positions=3)
    with prepare(load_sweep(rotator.file, {})) as prepared:
        still = describe(prepared, tmp_path / "none")
        moving = describe(replace(prepared, plan=rotating_plan(rotator.file)), tmp_path / "none")
    assert still["rotation"] is None
    assert moving["rotation"]["moves"] == 2
    assert moving["rotation"]["places"]["ddtree"] == ["here/card-1", "here/card-2", "here/card-0"]
    assert moving["eta_seconds"] > still["eta_seconds"] + 3 * 5
    show_plan(moving, Output())
    shown = capsys.readouterr().out
    assert "Positions: 2 moves, each about 5 s" in shown
    assert "here/card-2" in shown


def test_an_interrupted_rotation_goes_on_at_its_position(tmp_path: Path) -> None:
    rotator = rotator_of(tmp_path)
    with pytest.raises(Interrupted, match="0 of 2 cells are sealed"):
        rotator(ProcessMover(troubles={1: KeyboardInterrupt()}))
    plan = rotating_plan(rotator.file)
    kept = {cell.key: rotator.store.partial(cell.key) for cell in plan.cells}
    assert [by_position(rows) for rows in kept.values()] == [full(1)] * 2
    mover = ProcessMover(at=0)
    done = rotator(mover)
    assert mover.moves == [1]
    for cell in done.cells:
        assert cell.state is CellState.COMPLETE, cell.reason
        rows = rotator.store.rows(cell.key)
        assert rows[:PROMPTS] == kept[cell.key]
        assert by_position(rows) == full(2)


def test_a_service_that_does_not_get_to_a_position_fails_its_cells_alone(tmp_path: Path) -> None:
    rotator = rotator_of(tmp_path)
    done = rotator(ProcessMover(troubles={1: {"ddtree": "no such card"}}))
    assert cells(done)["ar"].state is CellState.COMPLETE
    assert by_position(rotator.store.rows(cells(done)["ar"].key)) == full(2)
    lost = cells(done)["ddtree 7"]
    reason = "the service did not get to position 2: no such card"
    assert (lost.state, lost.reason) == (CellState.FAILED, reason)
    assert by_position(rotator.store.rows(lost.key)) == full(1)
    mended = rotator(ProcessMover(at=1), retry_failed=True)
    assert mended.reused == [cells(done)["ar"].key]
    assert cells(mended)["ddtree 7"].state is CellState.COMPLETE
    assert by_position(rotator.store.rows(lost.key)) == full(2)


def test_a_service_that_is_not_ready_after_a_move_fails_its_cells_alone(tmp_path: Path) -> None:
    done = rotator_of(tmp_path, "ddtree:exit-at-start:9")(ProcessMover())
    assert cells(done)["ar"].state is CellState.COMPLETE
    assert cells(done)["ddtree 7"].state is CellState.FAILED
    reason = "the service did not get to position 1: service ddtree exited with code 9"
    assert reason in str(cells(done)["ddtree 7"].reason)


def test_a_service_that_dies_at_a_position_leaves_numbers_that_must_not_be_used(tmp_path: Path) -> None:
    """A start answers two golden prompts, a warm-up and one prompt of two. Nobody moves it any further."""
    done = rotator_of(tmp_path, "ddtree:dies-after:4")(ProcessMover())
    assert cells(done)["ar"].state is CellState.COMPLETE
    assert cells(done)["ddtree 7"].state is CellState.INVALID
    assert "exited with code 7" in str(cells(done)["ddtree 7"].reason)
