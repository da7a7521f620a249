"""Services that are loaded at the same time: none has an idle neighbour, one that fails takes others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ddtree_ops.schemas.results import CellState, RequestRow
from tests.integration.ops.conftest import Sweeper
from tests.support.ops import stub_sweep

PROMPTS = 3
SLOW_TREE = ("ddtree:delay:60", "ar:delay:1")


def ended(row: RequestRow) -> float:
    return row.sent_at + (row.e2e_s or 0.0)


def test_all_services_of_a_load_point_are_loaded_together(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, *SLOW_TREE, prompts=PROMPTS, engine={"replicas": 2})
    assert sweeper(path, "--side-by-side") == 0, sweeper.events[-1]
    cells = sweeper.cells()
    plain, tree = (sweeper.store.rows(cells[name].key) for name in ("ar", "ddtree 7"))
    assert len(plain) == len(tree) == 2 * PROMPTS
    assert min(row.sent_at for row in plain) < min(map(ended, tree))
    assert min(row.sent_at for row in tree) < min(map(ended, plain))
    for number in (0, 1):  # one request at a time at each replica
        mine = sorted((row for row in plain if row.number == number), key=lambda row: row.sent_at)
        assert all(ended(first) <= second.sent_at + 1e-3 for first, second in pairwise(mine))
    assert (cells["ar"].spec.beside, cells["ddtree 7"].spec.beside) == (["2 x ddtree 7"], ["2 x ar"])
    assert sweeper(path) == 0
    assert sweeper.events[-1]["reused"] == []  # one after the other they are other cells
    assert {cell.spec.beside for cell in sweeper.cells().values()} == {None}


#: So slow that `ar` is through, refused three times and found to be alive each time before it ends.
LATE_TREE = ("ddtree:delay:150", "ar:delay:1")


def test_a_service_that_is_through_stays_busy_and_spoils_its_neighbours_where_it_fails(
    tmp_path: Path, sweeper: Sweeper
) -> None:
    """Two golden prompts, a warm-up and its three prompts are answered; the requests that follow are not."""
    path = stub_sweep(tmp_path, *LATE_TREE, "ar:refuse-after:6", prompts=PROMPTS)
    assert sweeper(path, "--side-by-side") == 1
    cells = sweeper.cells()
    assert cells["ar"].requests == PROMPTS
    assert cells["ar"].failed_requests == 0
    assert "given up after 3 failed requests in a row" in str(cells["ar"].reason)
    assert cells["ddtree 7"].state is CellState.INVALID
    assert "loaded beside ar, which ended early" in str(cells["ddtree 7"].reason)


def test_a_sealed_cell_is_loaded_along_with_one_that_is_measured_again(
    tmp_path: Path, sweeper: Sweeper
) -> None:
    """The second time `ar` refuses after its golden prompts: it is seen to have been asked."""
    mended = tmp_path / "mended"
    path = stub_sweep(tmp_path, *LATE_TREE, f"ar:refuse-after:2:{mended}", prompts=PROMPTS)
    mended.touch()
    assert sweeper(path, "--side-by-side") == 0, sweeper.events[-1]
    key = sweeper.cells()["ddtree 7"].key
    sweeper.store.set_aside(key)
    mended.unlink()
    assert sweeper(path, "--side-by-side") == 1
    assert len(sweeper.events[-2]["reused"]) == 1
    assert "loaded beside ar, which ended early" in str(sweeper.cells()["ddtree 7"].reason)
    assert sweeper.cells()["ar"].state is CellState.COMPLETE


def test_a_service_cannot_serve_two_cells_at_once(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, budgets=[7, 15])
    assert sweeper(path, "--side-by-side", "--dry-run") == 2
    assert "service ddtree would serve ddtree 7 and ddtree 15 at once" in sweeper.error()
