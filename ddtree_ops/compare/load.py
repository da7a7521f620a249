"""Read a results store: sealed cells only, every record validated, every rows file checked against its hash.

Imports neither ansible nor docker nor an engine, so that it also runs on GPU hosts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from ddtree_ops.bench.store import Store
from ddtree_ops.errors import BadInput, from_validation
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import (
    RESULTS_SCHEMA,
    CellRecord,
    CellSpec,
    CellState,
    RequestRow,
    RequestStatus,
    RunRecord,
)


class Load(NamedTuple):
    """The load point of a cell: only cells of one load are compared with each other."""

    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Cell:
    """A sealed cell with its request rows, in the order sent."""

    record: CellRecord
    rows: tuple[RequestRow, ...]

    @property
    def spec(self) -> CellSpec:
        return self.record.spec

    @property
    def arm(self) -> Arm:
        return self.spec.arm

    @property
    def budget(self) -> int | None:
        return self.spec.budget

    @property
    def builder(self) -> Builder | None:
        return self.spec.builder

    @property
    def load(self) -> Load:
        return Load(self.spec.concurrency, self.spec.temperature)

    @property
    def label(self) -> str:
        """``ddtree 63``, ``dflash``; a builder other than best-first is named."""
        name = self.arm.value if self.budget is None else f"{self.arm.value} {self.budget}"
        return name if self.builder in {None, Builder.BEST_FIRST} else f"{name} {self.builder}"

    @property
    def ok_rows(self) -> list[RequestRow]:
        return [row for row in self.rows if row.status is RequestStatus.OK]

    @property
    def complete(self) -> bool:
        return self.record.state is CellState.COMPLETE


@dataclass(frozen=True)
class Results:
    """What one run needed and got. ``missing`` are planned cells that were never sealed."""

    path: Path
    run: RunRecord
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]

    def loads(self) -> list[Load]:
        return sorted({cell.load for cell in self.cells})

    def builders(self) -> list[Builder]:
        return sorted({cell.builder for cell in self.cells if cell.builder is not None})


def load_results(path: Path, run_id: str | None = None) -> Results:
    """Read the sealed cells of one run (default: the latest), in plan order.

    Raises:
        BadInput: no such folder, not a results store, a newer schema, a corrupt record, no such run,
            or no sealed cell at all.
    """
    _check_header(path)
    run = _choose_run(path, run_id)
    store = Store(path)
    sealed = {key: record for key in run.cells if (record := store.cell(key)) is not None}
    if not sealed:
        raise BadInput(
            f"{path}: run {run.run_id} has no sealed cell to compare",
            remedy="finish the sweep first: the same command goes on where it stopped",
        )
    cells = tuple(_cell(store, record) for record in sealed.values())
    return Results(path, run, cells, tuple(key for key in run.cells if key not in sealed))


def _check_header(path: Path) -> None:
    """A reader's view of the header: the store's own errors speak to somebody who wants to write to it."""
    file = path / "store.json"
    if not path.is_dir():
        raise BadInput(f"{path}: no such folder", remedy="give the folder that a sweep wrote")
    if not file.is_file():
        raise BadInput(
            f"{path}: not a results store (it has no store.json)",
            remedy="give the folder that a sweep wrote, not one inside it",
        )
    data = _read_json(file)
    kind = data.get("kind") if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or kind != "ddtree-results":
        raise BadInput.at(file=file, key="kind", found=kind, allowed="'ddtree-results'")
    version = data.get("schema_version")
    if version != RESULTS_SCHEMA:
        newer = isinstance(version, int) and version > RESULTS_SCHEMA
        raise BadInput.at(
            file=file,
            key="schema_version",
            found=version,
            allowed=str(RESULTS_SCHEMA),
            remedy=f"it was written by ddtree {data.get('ddtree_version', '?')}: upgrade" if newer else None,
        )


def _choose_run(path: Path, run_id: str | None) -> RunRecord:
    runs = sorted(
        (_read_run(file) for file in path.glob("runs/*/run.json")), key=lambda run: (run.started, run.run_id)
    )
    if not runs:
        raise BadInput(
            f"{path}: the store holds no run", remedy="run a sweep first: ddtree bench sweep --help"
        )
    if run_id is None:
        return runs[-1]
    for run in runs:
        if run.run_id == run_id:
            return run
    allowed = ", ".join(run.run_id for run in runs)
    raise BadInput.at(file=path, key="run", found=run_id, allowed=allowed)


def _read_run(file: Path) -> RunRecord:
    data = _read_json(file)
    try:
        return RunRecord.model_validate(data)
    except pydantic.ValidationError as error:
        raise from_validation(error, file=file) from error


def _cell(store: Store, record: CellRecord) -> Cell:
    if record.key != record.spec.key():
        raise BadInput(
            f"{store.root}: cell {record.key[:16]}: its key is not the hash of its spec",
            remedy="the cell was edited by hand: move its folder away and run the sweep again",
        )
    return Cell(record, tuple(store.rows(record.key)))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{file}: is corrupt: {error}") from error
