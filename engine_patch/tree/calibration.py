"""Calibrated edge scores: the chance that a candidate is right given that its path was.

A drafter's marginal understates the top-1 token of a path that has been right so far and overstates the
children of a sibling. The calibration is a logistic model in depth, rank and log-probability with one table
on the spine (the parent's path is all column 0) and one off it, fitted from logged steps:

    p(right | path right) = sigmoid(depth[d-1] + rank[r] + slope * max(logprob, logprob_floor))

**Arithmetic, so that a GPU builder can reproduce the scores bit for bit.** Everything is float32 without
fused multiply-add: `x = (depth + rank) + (slope * max(logprob, floor))`, and log sigmoid(x) is read from a
table of 1024 steps of 1/16 on [-32, 32] with linear interpolation (error <= 1.3e-4, no transcendental
function at run time): `t = (clamp(x) + 32) * 16`, `i = min(int(t), 1023)`,
`score = min(value[i] + (t - i) * step[i], 0)`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ddtree_engine.tree.errors import TreeInputError
from numpy.typing import ArrayLike, NDArray

SCHEMA = 1
KIND = "ddtree-calibration"

TABLE_LIMIT = 32.0
TABLE_PER_UNIT = 16.0
_GRID = np.arange(-TABLE_LIMIT, TABLE_LIMIT + 1 / TABLE_PER_UNIT, 1 / TABLE_PER_UNIT)
LOG_SIGMOID = (-np.logaddexp(0.0, -_GRID)).astype(np.float32)
LOG_SIGMOID_STEP = LOG_SIGMOID[1:] - LOG_SIGMOID[:-1]

Floats32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """One side's logistic model: depth float32[F-1], rank float32[K], slope per unit of log-probability."""

    depth: Floats32
    rank: Floats32
    slope: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fitted pair of edge tables for blocks of `block` tokens (F) and up to `topk` candidates (K)."""

    block: int
    topk: int
    logprob_floor: float
    on: EdgeTable
    off: EdgeTable
    fit: dict[str, Any] = field(default_factory=dict)

    def edge_scores(self, logprobs: ArrayLike, *, on_spine: bool) -> Floats32:
        """Log-chances float32[F-1, K'] of candidates with these log-probabilities; -inf stays -inf.

        Raises `TreeInputError` when the table has more positions or candidates than were fitted.
        """
        lp = np.asarray(logprobs, dtype=np.float32)
        if lp.ndim != 2 or lp.shape[0] > self.block - 1 or lp.shape[1] > self.topk:
            raise TreeInputError(
                f"calibration fitted for {self.block - 1} positions x {self.topk} candidates: "
                f"found a table of {' x '.join(map(str, lp.shape))}, allowed is at most that"
            )
        side = self.on if on_spine else self.off
        bias = side.depth[: lp.shape[0], None] + side.rank[None, : lp.shape[1]]
        x = bias + np.float32(side.slope) * np.maximum(lp, np.float32(self.logprob_floor))
        scores: Floats32 = np.where(lp == -np.inf, np.float32(-np.inf), log_sigmoid(x.astype(np.float32)))
        return scores


def log_sigmoid(x: Floats32) -> Floats32:
    """log(sigmoid(x)) in the float32 arithmetic of this module; inputs beyond +-32 are clamped."""
    limit, per_unit = np.float32(TABLE_LIMIT), np.float32(TABLE_PER_UNIT)
    t = (np.clip(x, -limit, limit) + limit) * per_unit
    i = np.minimum(t.astype(np.int32), len(LOG_SIGMOID_STEP) - 1)
    score: Floats32 = LOG_SIGMOID[i] + (t - i.astype(np.float32)) * LOG_SIGMOID_STEP[i]
    return np.minimum(score, np.float32(0.0))


def load_calibration(path: str | Path) -> Calibration:
    """Read and check a calibration file.

    Raises `TreeInputError` naming the file, the key, what was found and what is allowed.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TreeInputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise TreeInputError(f"{path}: found no JSON ({error}), allowed is a {KIND} file") from error
    return parse_calibration(data, source=str(path))


def parse_calibration(data: Any, source: str = "calibration") -> Calibration:
    """A `Calibration` from parsed JSON; `source` names it in errors (`TreeInputError`)."""
    reader = _Reader(source, _mapping(source, "(top level)", data))
    reader.literal("schema", SCHEMA)
    reader.literal("kind", KIND)
    block, topk = reader.count("block", least=2), reader.count("topk", least=1)
    floor = reader.number("logprob_floor")
    if floor >= 0:
        raise reader.wrong("logprob_floor", floor, "a number below 0")
    sides = [
        EdgeTable(side.numbers("depth", block - 1), side.numbers("rank", topk), side.number("slope"))
        for side in (reader.child("on"), reader.child("off"))
    ]
    fit = data.get("fit", {})
    return Calibration(block, topk, floor, sides[0], sides[1], _mapping(source, "fit", fit))


@dataclass(frozen=True)
class _Reader:
    source: str
    data: dict[str, Any]
    prefix: str = ""

    def wrong(self, key: str, found: Any, allowed: str) -> TreeInputError:
        return TreeInputError(f"{self.source}: {self.prefix}{key}: found {found!r}, allowed is {allowed}")

    def value(self, key: str, allowed: str) -> Any:
        if key not in self.data:
            raise TreeInputError(f"{self.source}: {self.prefix}{key}: missing, allowed is {allowed}")
        return self.data[key]

    def literal(self, key: str, expected: int | str) -> None:
        found = self.value(key, repr(expected))
        if found != expected or isinstance(found, bool):
            raise self.wrong(key, found, repr(expected))

    def count(self, key: str, least: int) -> int:
        found = self.value(key, f"a whole number >= {least}")
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.wrong(key, found, f"a whole number >= {least}")
        return found

    def number(self, key: str) -> float:
        found = self.value(key, "a finite number")
        if not _is_number(found):
            raise self.wrong(key, found, "a finite number")
        return float(found)

    def numbers(self, key: str, length: int) -> Floats32:
        allowed = f"a list of {length} finite numbers"
        found = self.value(key, allowed)
        if not isinstance(found, list) or len(found) != length:
            shown = f"a list of {len(found)}" if isinstance(found, list) else found
            raise self.wrong(key, shown, allowed)
        for index, entry in enumerate(found):
            if not _is_number(entry):
                raise self.wrong(f"{key}[{index}]", entry, "a finite number")
        return np.asarray(found, dtype=np.float32)

    def child(self, key: str) -> _Reader:
        found = self.value(key, "an object with depth, rank and slope")
        return _Reader(self.source, _mapping(self.source, key, found), f"{self.prefix}{key}.")


def _mapping(source: str, key: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TreeInputError(f"{source}: {key}: found {type(found).__name__}, allowed is an object")
    return found


def _is_number(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
