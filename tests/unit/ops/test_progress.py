"""Cells on their way: what is left of a rotation, and the state that each ends in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddtree_ops.bench.dataset import Dataset, Prompt
from ddtree_ops.bench.plan import Plan, PlannedCell, make_plan
from ddtree_ops.bench.progress import Progress, stays
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import CellState, Gate, GateStatus, ReplicaAt, RequestRow, RequestStatus
from ddtree_ops.schemas.sweep import Sweep
from ddtree_ops.services.base import Identity, ServiceSpec
from ddtree_ops.services.rotation import Rotation
from tests.support.ops import request_row

PROMPTS = 2
POSITIONS = 3


def plan(*, rotates: bool = True) -> Plan:
    dataset = Dataset("x", tuple(Prompt(f"p{number}", text="x") for number in range(PROMPTS)), "d")
    identity = Identity("sglang", "1", "m", None, "bfloat16", 16, Builder.BEST_FIRST, ())
    services = [ServiceSpec(arm.value, arm, None, identity, url="http://h:1") for arm in (Arm.AR, Arm.DDTREE)]
    sweep = Sweep.model_validate({"arms": ["ar", "ddtree"], "budgets": [7], "repeats": POSITIONS})
    seats = {
        name: tuple((ReplicaAt(host=host),) for host in hosts)
        for name, hosts in {"ar": "abc", "ddtree": "bca"}.items()
    }
    rotation = Rotation(seats, move_s=10) if rotates else None
    return make_plan(sweep, dataset, services, host_fingerprint="h", rotation=rotation)


def rows(*counts: int) -> list[RequestRow]:
    """So many prompts at each position."""
    return [
        request_row(index, repeat=position, position=position)
        for position, count in enumerate(counts)
        for index in range(count)
    ]


def begun(made: Plan, *cells: Sequence[int]) -> list[Progress]:
    return [Progress(cell, rows(*counts)) for cell, counts in zip(made.cells, cells, strict=True)]


@pytest.mark.parametrize(
    ("cells", "left"),
    [
        (([], []), [(0, False), (1, True), (2, True)]),
        (([2, 2], [2, 2]), [(2, True)]),
        (([2, 1], [2, 1]), [(1, False), (2, True)]),  # moved to already
        (([2, 2, 2], []), [(0, False), (1, False), (2, False)]),
        (([2, 2, 2], [2, 2, 2]), [(2, False)]),  # only to be judged
    ],
)
def test_a_rotation_goes_on_at_the_first_position_that_lacks_a_request(
    cells: tuple[list[int], list[int]], left: list[tuple[int, bool]]
) -> None:
    made = plan()
    found = stays(made, begun(made, *cells))
    assert [(stay.position, stay.moves) for stay in found] == left
    assert [stay.last for stay in found] == [False] * (len(left) - 1) + [True]
    assert all(list(stay.repeats) == [stay.position] for stay in found)


def test_without_a_rotation_all_repeats_are_measured_on_one_start() -> None:
    made = plan(rotates=False)
    (stay,) = stays(made, begun(made, [], []))
    assert (stay.position, list(stay.repeats), stay.moves, stay.last) == (0, [0, 1, 2], False, True)


def cell() -> PlannedCell:
    return plan().cells[1]


def test_a_dead_service_leaves_an_invalid_cell_where_it_had_answered_and_else_a_failed_one() -> None:
    answered = Progress(cell(), rows(2), given_up="exited with code 7", died=True)
    assert answered.outcome([]) == (CellState.INVALID, "exited with code 7")
    refused = [request_row(0, status=RequestStatus.FAILED, error="refused")]
    for nothing in ([], refused):
        silent = Progress(cell(), list(nothing), given_up="exited with code 7", died=True)
        assert silent.outcome([]) == (CellState.FAILED, "exited with code 7")
    given_up = Progress(cell(), rows(2), given_up="three timeouts in a row")
    assert given_up.outcome([])[0] is CellState.FAILED


def test_a_cell_without_trouble_is_complete_unless_a_gate_fails() -> None:
    progress = Progress(cell(), rows(2, 2, 2))
    assert progress.outcome([Gate(id="loops", status=GateStatus.PASS)]) == (CellState.COMPLETE, None)
    bad = Gate(id="loops", status=GateStatus.FAIL, detail="3 outputs")
    assert progress.outcome([bad]) == (CellState.INVALID, "gate loops: 3 outputs")


def test_totals_of_several_starts_add_up_and_one_that_is_not_known_takes_none_away() -> None:
    progress = Progress(cell(), [])
    progress.add_totals(None)
    assert progress.totals is None
    for grown in ({"requests": 3}, None, {"requests": 4}):
        progress.add_totals(grown)
    assert progress.totals == {"requests": 7}


def test_each_replica_has_to_answer_each_prompt() -> None:
    """An interrupted cell goes on with what one of two replicas has not answered yet."""
    (cell,) = [one for one in plan(rotates=False).cells if one.spec.arm is Arm.AR]
    cell = replace(cell, spec=cell.spec.model_copy(update={"replicas": ["a", "b"], "repeats": 1}))
    both = [ReplicaAt(number=number, host="ab"[number]) for number in (0, 1)]
    answered = [
        request_row(0, replica=both[0]),
        request_row(1, replica=both[0]),
        request_row(0, replica=both[1]),
    ]
    progress = Progress(cell, answered)
    assert cell.requests == 2 * PROMPTS
    assert [progress.done(0, 1, number) for number in progress.replicas] == [True, False]
    assert progress.lacks(range(1))
    progress.rows.append(request_row(1, replica=both[1]))
    assert not progress.lacks(range(1))
