"""The A/A floor: how far one service differs from itself, from one start to the next.

Two starts of the same service are measured as if they were two arms. Their ratio should be 1; what it is
instead is noise that an interval over the prompts of one start each does not hold. Every cell of a store with
several positions is such a measurement, whatever run it belongs to: `ddtree bench aa` makes one of one arm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import pandas as pd

from ddtree_ops.bench.store import Store
from ddtree_ops.compare.frames import by_position, cell_frame
from ddtree_ops.compare.load import Cell
from ddtree_ops.compare.measures import column, lacks
from ddtree_ops.compare.statistics import Bootstrap, Interval
from ddtree_ops.compare.verdicts import Answer, BestBudget, Metric, Verdict
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellSpec, CellState

#: What must be equal for a floor to say something of a cell. Prompts and lengths may differ.
SAME_SERVICE = (
    "concurrency",
    "temperature",
    "model_sha256",
    "engine",
    "engine_version",
    "dtype",
    "host_fingerprint",
)

Judged = TypeVar("Judged", Verdict, BestBudget)


@dataclass(frozen=True)
class Floor:
    """One service against itself. ``ratio`` is of the two starts that lie furthest apart.

    ``low`` and ``high`` hold the intervals of all pairs of starts, either way round: 1 / high is low.
    """

    cell: Cell
    metric: Metric
    positions: int
    ratio: Interval
    low: float
    high: float

    @property
    def text(self) -> str:
        """For people."""
        ratio = f"{self.ratio.value:.3f} [{self.ratio.low:.3f}, {self.ratio.high:.3f}]"
        return (
            f"A/A, {self.metric.words}: {self.cell.label} against itself, {self.positions} starts: "
            f"{ratio} between the two furthest apart; floor {self.low:.3f} to {self.high:.3f}"
        )

    def covers(self, spec: CellSpec) -> bool:
        """Whether it was measured on the same kind of service, machine and load."""
        return _alike(self.cell.spec, spec)

    def holds(self, ratio: Interval) -> bool:
        """Whether a ratio's whole interval may be the noise of a start; over several starts it holds that."""
        if ratio.low is None or ratio.high is None or ratio.positions > 1:
            return False
        return self.low <= ratio.low and ratio.high <= self.high


def floors_of(path: Path, specs: Iterable[CellSpec], *, seed: int = 0) -> list[Floor]:
    """Floors of a store that say something of these cells, whichever run measured them."""
    wanted = list(specs)
    found = []
    for cell in _repeated_cells(path, wanted):
        frame = cell_frame(cell)
        every = (floor_of(cell, frame, metric, seed=seed) for metric in Metric)
        found += [floor for floor in every if floor is not None]
    return found


def floor_of(cell: Cell, frame: pd.DataFrame, metric: Metric, *, seed: int = 0) -> Floor | None:
    """The floor of a complete cell; None where its starts give no interval."""
    parts = by_position(frame)
    top, bottom = metric.columns
    if len(parts) < 2 or any(lacks(part, top, bottom) for part in parts.values()):
        return None
    pairs = [_ratio(parts[second], parts[first], metric, seed) for first, second in combinations(parts, 2)]
    known = [ratio for ratio in pairs if ratio is not None and ratio.low and ratio.high]
    if not known:
        return None
    furthest = max(known, key=lambda ratio: abs(math.log(ratio.value)))
    reach = max(max(float(ratio.high or 1), 1 / float(ratio.low or 1)) for ratio in known)
    return Floor(cell, metric, len(parts), furthest, 1 / reach, reach)


def above_floor(judged: Judged, floors: Sequence[Floor]) -> Judged:
    """The same, or "can't tell" where the whole interval lies within the floor."""
    floor = widest(floors, judged.cell.spec, judged.metric)
    decided = judged.answer in {Answer.FASTER, Answer.SLOWER}
    if floor is None or judged.ratio is None or not decided or not floor.holds(judged.ratio):
        return judged
    reason = f"within the A/A floor: {floor.cell.label} against itself reaches {floor.high:.3f}"
    return replace(judged, answer=Answer.CANT_TELL, reason=reason)


def widest(floors: Sequence[Floor], spec: CellSpec, metric: Metric) -> Floor | None:
    """Of the floors that say something of a cell, the one that reaches furthest."""
    fitting = [floor for floor in floors if floor.metric is metric and floor.covers(spec)]
    return max(fitting, key=lambda floor: floor.high, default=None)


def _ratio(ours: pd.DataFrame, theirs: pd.DataFrame, metric: Metric, seed: int) -> Interval | None:
    top, bottom = metric.columns
    first, second = {0: ours}, {0: theirs}
    return Bootstrap(len(ours), seed=seed).ratio_of_rates(
        (column(first, top), column(first, bottom)), (column(second, top), column(second, bottom))
    )


def _repeated_cells(path: Path, wanted: Sequence[CellSpec]) -> list[Cell]:
    """Complete cells with several positions that fit one of the specs; `unsafe` is no measure of anything."""
    store, found = Store(path), []
    for file in sorted(path.glob("cells/*/cell.json")):
        if not _rotated(file):
            continue
        record = store.cell(json.loads(file.read_text(encoding="utf-8"))["key"])
        if record is None or record.state is not CellState.COMPLETE or record.spec.positions < 2:
            continue
        if record.spec.arm is Arm.UNSAFE:
            continue
        if any(_alike(record.spec, spec) for spec in wanted):
            found.append(Cell(record, tuple(store.rows(record.key))))
    return found


def _alike(one: CellSpec, other: CellSpec) -> bool:
    """Busy neighbours are noise of their own: a floor without them says nothing of services side by side."""
    alone = one.beside is None, other.beside is None
    return alone[0] == alone[1] and all(getattr(one, name) == getattr(other, name) for name in SAME_SERVICE)


def _rotated(file: Path) -> bool:
    """Whether a record has several positions; one of another run that is broken is not our concern."""
    try:
        return bool(json.loads(file.read_text(encoding="utf-8"))["spec"]["rotation"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
