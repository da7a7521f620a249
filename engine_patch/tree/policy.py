"""Which of several verify widths a batch should run at.

A step of width Q over N requests takes `seconds(Q, N)` and emits `accept length(Q)` tokens a request, so the
best width has the largest accept length per second. Seconds come from a table that was measured on the host;
accept lengths are estimated while serving. Builders add nodes in an order that does not depend on the budget,
so a tree of Q nodes holds every smaller one as its first nodes, and one step scores all widths up to its own.

Deterministic: the same observations in the same order give the same choices, so every rank of a
tensor-parallel server can decide for itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ddtree_engine.tree.errors import TreeInputError
from numpy.typing import ArrayLike, NDArray

SCHEMA = 1
KIND = "ddtree-step-costs"

# Request steps after which an observation counts half.
HALF_LIFE = 512
# Request steps at the widest before anything else is chosen.
WARM_UP = 64
# Another width has to promise this much more than the present one.
MARGIN = 0.01
# Choices of a batch size between two changes.
DWELL = 8
# Of the time, spent at the widest to see what the present width does not show.
PROBE_SHARE = 0.005
PROBE_LEAST = 64

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Seconds of a step: for every width the measured batch sizes, ascending, and their seconds."""

    table: dict[int, tuple[Floats, Floats]]

    def seconds(self, width: int, batch: int) -> float:
        """Seconds of a step of `batch` requests, linear between and beyond the measured batch sizes."""
        sizes, seconds = self.table[width]
        if len(sizes) == 1 or batch <= sizes[-1]:
            return float(np.interp(batch, sizes, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return float(seconds[-1] + slope * (batch - sizes[-1]))


def load_costs(path: Path) -> StepCosts:
    """Read a table of step seconds. Raises `TreeInputError` naming file, key, found and allowed."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TreeInputError(f"{path}: cannot be read: {error}") from error
    return parse_costs(data, source=str(path))


def parse_costs(data: Any, source: str = "costs") -> StepCosts:
    """From `{"schema": 1, "kind": "ddtree-step-costs", "seconds": {WIDTH: {BATCH: SECONDS}}}`.

    Raises `TreeInputError` naming `source`, key, found and allowed.
    """

    def wrong(key: str, found: Any, allowed: str) -> TreeInputError:
        return TreeInputError(f"{source}: {key}: found {found!r}, allowed is {allowed}")

    if not isinstance(data, dict):
        raise wrong("(top level)", type(data).__name__, "a JSON object")
    for key, expected in (("schema", SCHEMA), ("kind", KIND)):
        if data.get(key) != expected:
            raise wrong(key, data.get(key), repr(expected))
    seconds = data.get("seconds")
    if not isinstance(seconds, dict) or not seconds:
        raise wrong("seconds", seconds, "an object of widths")
    table = {}
    for width, row in seconds.items():
        where = f"seconds.{width}"
        if not _is_count(width):
            raise wrong("seconds", width, "widths: whole numbers above 0")
        if not isinstance(row, dict) or not row:
            raise wrong(where, row, "an object of batch sizes")
        for batch, value in row.items():
            if not _is_count(batch):
                raise wrong(where, batch, "batch sizes: whole numbers above 0")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise wrong(f"{where}.{batch}", value, "seconds above 0")
        pairs = sorted((int(batch), float(value)) for batch, value in row.items())
        table[int(width)] = (np.array([b for b, _ in pairs], float), np.array([s for _, s in pairs]))
    return StepCosts(table)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0


class AcceptEstimates:
    """Accept length at each width, ascending, from steps at any of them.

    The narrowest is seen in every step. A wider one is held as its ratio to the next narrower one over the
    steps that show both, so that it moves with the text while it is not run.
    """

    def __init__(self, widths: Sequence[int], half_life: float = HALF_LIFE) -> None:
        self.widths = tuple(widths)
        self._decay = 0.5 ** (1 / half_life)
        self._own = np.zeros(len(self.widths))
        self._below = np.zeros(len(self.widths))
        self.seen = np.zeros(len(self.widths), dtype=np.int64)

    def add(self, lengths: ArrayLike) -> None:
        """lengths int[N, W]: accept lengths (bonus included) of a step's requests at the W narrowest widths,
        W as wide as the step was."""
        rows = np.asarray(lengths, dtype=np.float64)
        if not len(rows):
            return
        count, shown = rows.shape
        totals = rows.sum(0)
        below = np.concatenate([[float(count)], totals[:-1]])
        keep = self._decay**count
        self._own[:shown] = self._own[:shown] * keep + totals
        self._below[:shown] = self._below[:shown] * keep + below
        self.seen[:shown] += count

    def read(self) -> Floats:
        """Estimated accept length of every width; 1 below anything seen, and never less than a narrower's."""
        ratios = np.divide(self._own, self._below, out=np.ones_like(self._own), where=self._below > 0)
        lengths: Floats = np.multiply.accumulate(np.maximum(ratios, 1.0))
        return lengths


class WidthPolicy:
    """Chooses a width for every step. Widths ascend; every one of them has costs."""

    def __init__(self, widths: Sequence[int], costs: StepCosts) -> None:
        missing = [width for width in widths if width not in costs.table]
        if missing:
            raise TreeInputError(
                f"costs: found no seconds for width {', '.join(map(str, missing))}, "
                f"allowed are tables of all of {', '.join(map(str, widths))}"
            )
        self.widths = tuple(widths)
        self.costs = costs
        self.estimates = AcceptEstimates(widths)
        # Batch size -> its width and how many more choices it stays.
        self._present: dict[int, tuple[int, int]] = {}
        self._since_widest = 0

    def observe(self, lengths: ArrayLike) -> None:
        """What a finished step accepted; see `AcceptEstimates.add`."""
        self.estimates.add(lengths)

    def choose(self, batch: int) -> int:
        """The width of the next step, of `batch` requests."""
        widest = self.widths[-1]
        if self.estimates.seen[-1] < WARM_UP:
            return widest
        width = self._settle(batch)
        self._since_widest = 0 if width == widest else self._since_widest + 1
        if self._since_widest >= self._steps_between_probes(width, batch):
            self._since_widest = 0
            return widest
        return width

    def present(self) -> dict[int, int]:
        """Batch size -> the width it runs at now, probes aside."""
        return {batch: width for batch, (width, _) in sorted(self._present.items())}

    def rates(self, batch: int) -> Floats:
        """Expected tokens a second of one request at every width."""
        seconds = np.array([self.costs.seconds(width, batch) for width in self.widths])
        rates: Floats = self.estimates.read() / seconds
        return rates

    def _settle(self, batch: int) -> int:
        rates = self.rates(batch)
        best = int(rates.argmax())
        if batch not in self._present:
            self._present[batch] = (self.widths[best], DWELL)
            return self.widths[best]
        width, stays = self._present[batch]
        gains = rates[best] > rates[self.widths.index(width)] * (1 + MARGIN)
        if stays <= 0 and gains:
            self._present[batch] = (self.widths[best], DWELL)
            return self.widths[best]
        self._present[batch] = (width, max(0, stays - 1))
        return width

    def _steps_between_probes(self, width: int, batch: int) -> int:
        extra = self.costs.seconds(self.widths[-1], batch) / self.costs.seconds(width, batch) - 1
        return max(PROBE_LEAST, math.ceil(extra / PROBE_SHARE))
