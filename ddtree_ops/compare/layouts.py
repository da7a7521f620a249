"""Tokens a second of whole services, by how they lie on cards: per host, per GPU, and replica by replica.

A layout is how many replicas a service has and over how many GPUs each goes (`2 x 1 GPU`, `1 x 4 GPUs`). To
set layouts side by side, every complete cell of the store that measured the same work counts, whichever run
it belongs to. Where services are loaded in turn, a layout's figure is that of a service with its hosts to
itself; where they are loaded side by side, what all give together is a figure of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ddtree_ops.bench.store import Store
from ddtree_ops.bench.throughput import Throughput, share_together, throughput_of
from ddtree_ops.compare.frames import by_position, cell_frame
from ddtree_ops.compare.load import Cell, Load
from ddtree_ops.compare.measures import column, lacks
from ddtree_ops.compare.statistics import Bootstrap, Interval
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellSpec, CellState, ReplicaAt, RequestRow

#: What must be equal for two layouts to be set side by side.
SAME_WORK = (
    "model_sha256",
    "engine",
    "engine_version",
    "dtype",
    "dataset_sha256",
    "prompts",
    "max_tokens",
    "ignore_eos",
    "host_fingerprint",
)
#: The host of a process of our own.
HERE = "localhost"


class Layout(NamedTuple):
    """``gpus`` are those of each replica; 0 where none is known, as on the CPU engine."""

    replicas: int
    gpus: int

    @property
    def units(self) -> int:
        """GPUs, or replicas where none is known."""
        return self.replicas * max(self.gpus, 1)

    def __str__(self) -> str:
        if not self.gpus:
            return f"{self.replicas} replica{'s' if self.replicas != 1 else ''}"
        return f"{self.replicas} x {self.gpus} GPU{'s' if self.gpus != 1 else ''}"


@dataclass(frozen=True)
class PlaceRate:
    """Tokens a second of the replicas that were at one place; one that moved has several."""

    at: ReplicaAt
    rate: Interval
    requests: int


@dataclass(frozen=True)
class HostRate:
    """What a service gives on one host.

    rate       tokens a second of all its replicas there
    each       the same for each GPU, or for each replica where no GPU is known
    in_flight  requests at the same time at a replica, on average while it is busy
    together   of the time in which any replica was busy, the share in which all were; null for one replica
    """

    cell: Cell
    host: str
    layout: Layout
    rate: Interval
    each: Interval
    in_flight: float
    together: float | None
    places: tuple[PlaceRate, ...]

    @property
    def load(self) -> Load:
        return self.cell.load


@dataclass(frozen=True)
class Together:
    """What all services of a host give that were loaded side by side.

    services  cells with their replicas, as in ``CellSpec.beside``
    units     GPUs of all, or replicas where not all are known
    """

    cells: tuple[Cell, ...]
    host: str
    services: tuple[str, ...]
    units: int
    gpus_known: bool
    rate: Interval
    each: Interval

    @property
    def load(self) -> Load:
        return self.cells[0].load


def layouts_of(path: Path, specs: Iterable[CellSpec], *, seed: int = 0) -> list[HostRate]:
    """The rates of all cells that did the work of these, by host; none where there is one card and layout."""
    wanted = list(specs)
    cells = _fitting_cells(path, wanted)
    found = [rate for cell in cells for rate in host_rates(cell, cell_frame(cell), seed=seed)]
    layouts = {rate.layout for rate in found}
    places = {place.at.place for rate in found for place in rate.places}
    several = len(layouts) > 1 or len(places) > 1 or any(layout.units > 1 for layout in layouts)
    if not several and all(cell.spec.beside is None for cell in cells):
        return []
    return sorted(found, key=_order)


def host_rates(cell: Cell, frame: pd.DataFrame, *, seed: int = 0) -> list[HostRate]:
    """The rates of a complete cell, by host; none where a replica lacks a prompt."""
    rows_of: dict[int, list[RequestRow]] = {}
    for row in cell.rows:
        rows_of.setdefault(row.number, []).append(_placed(row, cell.spec))
    replicas = dict(sorted(rows_of.items()))
    hosts: dict[str, list[int]] = {}
    for number, rows in replicas.items():
        hosts.setdefault(_at(rows[-1]).host, []).append(number)
    found = []
    for host, numbers in hosts.items():
        rows = [row for number in numbers for row in replicas[number]]
        rate = _rate([(frame, number, replicas[number]) for number in numbers], seed)
        if rate is None:
            return []
        layout = Layout(len(numbers), len(_at(rows[-1]).gpus))
        flights = [throughput_of(replicas[number]).in_flight or 0.0 for number in numbers]
        found.append(
            HostRate(
                cell=cell,
                host=host,
                layout=layout,
                rate=rate,
                each=rate.divided(layout.units),
                in_flight=sum(flights) / len(flights),
                # Neighbours that are through stay busy, with requests that no row holds.
                together=share_together(rows) if cell.spec.beside is None else None,
                places=tuple(_place_rates(rows, seed)),
            )
        )
    return found


def side_by_side(rates: Sequence[HostRate], *, seed: int = 0) -> list[Together]:
    """What hosts give whose services were loaded side by side, where all of these have a rate."""
    groups: dict[tuple[Any, ...], list[HostRate]] = {}
    for rate in rates:
        spec = rate.cell.spec
        if spec.beside is not None:
            services = tuple(sorted([*spec.beside, f"{spec.copies} x {rate.cell.label}"]))
            groups.setdefault((rate.load, services, spec.repeats, spec.seed, spec.positions), []).append(rate)
    found = []
    for (_, services, *_), group in groups.items():
        cells = {rate.cell.record.key: rate.cell for rate in group}
        if len(cells) != len(services):
            continue
        for host in sorted({rate.host for rate in group}):
            here = [rate for rate in group if rate.host == host]
            whole = _together(here, host, services, seed)
            found += [whole] if whole is not None else []
    return found


def _together(rates: Sequence[HostRate], host: str, services: tuple[str, ...], seed: int) -> Together | None:
    parts = []
    for rate in rates:
        frame, placed = cell_frame(rate.cell), [_placed(row, rate.cell.spec) for row in rate.cell.rows]
        for number in sorted({row.number for row in placed if _at(row).host == host}):
            parts.append((frame, number, [row for row in placed if row.number == number]))
    sum_of = _rate(parts, seed)
    if sum_of is None:
        return None
    known = all(rate.layout.gpus for rate in rates)
    units = sum(rate.layout.units if known else rate.layout.replicas for rate in rates)
    cells = tuple(rate.cell for rate in rates)
    return Together(cells, host, services, units, known, sum_of, sum_of.divided(units))


def _rate(replicas: Sequence[tuple[pd.DataFrame, int, Sequence[RequestRow]]], seed: int) -> Interval | None:
    """Of replicas that are loaded together: the sum of their rates, over the same draws of prompts.

    replicas  the frame of its cell, its number and its rows
    """
    parts, shape = [], None
    for frame, number, rows in replicas:
        sums = by_position(frame[frame["replica"] == number])
        same = {position: list(part.index) for position, part in sums.items()}
        shape = same if shape is None else shape
        if same != shape or any(
            part.empty or lacks(part, "completion_tokens", "e2e_s") for part in sums.values()
        ):
            return None
        # A request's own time is scaled to the time that the replica was busy: requests overlap there.
        factor = throughput_of(rows).in_flight or 0.0
        parts.append((column(sums, "completion_tokens"), column(sums, "e2e_s"), factor))
    prompts = len(next(iter(shape.values()))) if shape else 0
    return Bootstrap(prompts, positions=len(shape or {}), seed=seed).sum_of_rates(parts)


def _place_rates(rows: Sequence[RequestRow], seed: int) -> list[PlaceRate]:
    """Each place alone: its prompts are the draws, since a place has no positions to draw."""
    places: dict[tuple[str, int | None], list[RequestRow]] = {}
    for row in rows:
        at = _at(row)
        places.setdefault((at.place, None if at.gpus else at.number), []).append(row)
    found = []
    for some in places.values():
        whole: Throughput = throughput_of(some)
        sums: dict[str, list[float]] = {}
        for row in some:
            totals = sums.setdefault(row.prompt_id, [0.0, 0.0])
            totals[0] += row.completion_tokens
            totals[1] += row.e2e_s or 0.0
        tops, bottoms = ([totals[part] for totals in sums.values()] for part in (0, 1))
        rate = Bootstrap(len(sums), seed=seed).sum_of_rates([(tops, bottoms, whole.in_flight or 0.0)])
        if rate is not None:
            found.append(PlaceRate(whole.at, rate, whole.requests))
    return sorted(found, key=lambda one: (one.at.cards, one.at.number))


def _placed(row: RequestRow, spec: CellSpec) -> RequestRow:
    """The row with its place, also that of a process of our own or of an older store."""
    if row.replica is not None:
        return row
    host, _, gpus = (row.place or HERE).partition("/")
    said = dict(word.split("=", 1) for word in spec.argv if word.startswith(("host=", "gpus=")))
    if row.place is None and "host" in said:
        host, gpus = said["host"], said.get("gpus", "").replace(",", "+")
    at = ReplicaAt(host=host, gpus=gpus.split("+") if gpus else [])
    return row.model_copy(update={"replica": at})


def _at(row: RequestRow) -> ReplicaAt:
    assert row.replica is not None
    return row.replica


def _order(rate: HostRate) -> tuple[object, ...]:
    spec = rate.cell.spec
    arms = list(Arm)
    arm = (arms.index(spec.arm), spec.budget or 0, str(spec.builder))
    return (rate.load, *arm, rate.layout.gpus, spec.copies, rate.cell.record.key, rate.host)


def _fitting_cells(path: Path, wanted: Sequence[CellSpec]) -> list[Cell]:
    """Complete cells that did the same work; `unsafe` did none that counts."""
    store, found = Store(path), []
    for file in sorted(path.glob("cells/*/cell.json")):
        key = _key_of(file, wanted)
        record = store.cell(key) if key is not None else None
        if record is None or record.state is not CellState.COMPLETE or record.spec.arm is Arm.UNSAFE:
            continue
        found.append(Cell(record, tuple(store.rows(record.key))))
    return found


def _key_of(file: Path, wanted: Sequence[CellSpec]) -> str | None:
    """The key of a record that fits; one of another run that is broken is not our concern."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        fits = any(all(data["spec"][name] == getattr(spec, name) for name in SAME_WORK) for spec in wanted)
        return str(data["key"]) if fits else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
