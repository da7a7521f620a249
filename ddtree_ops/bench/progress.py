"""Cells on their way to being sealed: what they have so far, and what ended them early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddtree_ops.bench.gates import failed
from ddtree_ops.bench.plan import Plan, PlannedCell
from ddtree_ops.schemas.results import CellState, Gate, RequestRow, RequestStatus


@dataclass(eq=False)
class Progress:
    """A cell that is being measured.

    given_up  why it was ended early
    died      it was ended because its service was dead
    invalid   what is wrong with its numbers, known before the gates
    logs      ends of logs by replica, where a request failed
    totals    how its servers' totals grew, over all its loads

    By replica: `warm_outputs`, and `failures_in_a_row`.
    """

    cell: PlannedCell
    rows: list[RequestRow]
    started: str | None = None
    warm_outputs: dict[int, list[int]] = field(default_factory=dict)
    failures_in_a_row: Counter[int] = field(default_factory=Counter)
    given_up: str | None = None
    died: bool = False
    invalid: str | None = None
    logs: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] | None = None

    def __post_init__(self) -> None:
        if self.rows:
            began = datetime.fromtimestamp(self.rows[0].sent_at, UTC)
            self.started = began.isoformat(timespec="milliseconds")

    @property
    def open(self) -> bool:
        return self.given_up is None and self.invalid is None

    @property
    def failures(self) -> list[RequestRow]:
        return [row for row in self.rows if row.status is RequestStatus.FAILED]

    @property
    def replicas(self) -> range:
        """The numbers of its service's replicas."""
        return range(self.cell.spec.copies)

    def done(self, repeat: int, index: int, number: int = 0) -> bool:
        """Whether a replica answered a prompt in a repeat."""
        place = (repeat, index, number)
        return any((row.repeat, row.prompt_index, row.number) == place for row in self.rows)

    def lacks(self, repeats: Iterable[int]) -> bool:
        """Whether a request of these repeats is still to be sent."""
        wanted = set(repeats)
        have = sum(row.repeat in wanted for row in self.rows)
        return have < len(wanted) * self.cell.spec.prompts * self.cell.spec.copies

    def add_totals(self, grown: Mapping[str, int] | None) -> None:
        """Count a load's growth in; a load that is not known of leaves what is."""
        if grown is not None:
            self.totals = {name: (self.totals or {}).get(name, 0) + count for name, count in grown.items()}

    def outcome(self, gates: Sequence[Gate]) -> tuple[CellState, str | None]:
        """The state to seal it in, with the reason.

        A service that died after it had answered leaves numbers that must not be used, since a mean over the
        requests before a crash is none: invalid. Where it answered none, there is nothing: failed.
        """
        if self.given_up:
            spoiled = self.died and len(self.failures) < len(self.rows)
            return CellState.INVALID if spoiled else CellState.FAILED, self.given_up
        if self.invalid:
            return CellState.INVALID, self.invalid
        if self.failures:
            first = self.failures[0]
            count = f"{len(self.failures)} of {self.cell.requests} requests failed"
            return CellState.FAILED, f"{count}; {first.prompt_id}: {first.error}"
        if bad := failed(gates):
            return CellState.INVALID, "; ".join(f"gate {gate.id}: {gate.detail}" for gate in bad)
        return CellState.COMPLETE, None


@dataclass(frozen=True)
class Stay:
    """Repeats that are measured on one start of the services.

    position  which start it is
    moves     whether services have to be started for it, even where they stand in its places
    last      cells are judged at its end
    """

    position: int
    repeats: range
    moves: bool = False
    last: bool = True


def stays(plan: Plan, begun: Iterable[Progress]) -> list[Stay]:
    """The stays that are left: one with all repeats without a rotation, else one for each repeat.

    begun  the cells that are not sealed, with their rows of an interrupted run
    """
    if plan.rotation is None:
        return [Stay(0, range(plan.sweep.repeats))]
    cells = list(begun)
    every = [range(position, position + 1) for position in range(plan.rotation.positions)]
    left = [repeats for repeats in every if any(progress.lacks(repeats) for progress in cells)]
    left = left or every[-1:]  # all is measured: somebody must be there to ask about near-ties
    return [Stay(repeats[0], repeats, _moves(repeats[0], cells), repeats is left[-1]) for repeats in left]


def _moves(position: int, cells: Iterable[Progress]) -> bool:
    """A position with rows was moved to before the interruption; whoever started services made the first."""
    return position > 0 and not any(row.repeat == position for cell in cells for row in cell.rows)
