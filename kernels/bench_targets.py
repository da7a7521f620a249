"""What the kernels have to reach, and the summary that holds it against what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Two bounds for one arithmetic: a product in tf32 would keep the first and miss the second.
LOOSE_ERROR, TIGHT_ERROR = 3e-3, 1e-4


@dataclass(frozen=True)
class Target:
    """One row of the summary. `figure` is what is measured in the unit that `what` names.

    of  the measurement it reads, where that is not the one of its own id
    """

    what: str
    target: float
    direction: str
    error: float | None = None
    stock: bool = False
    of: str | None = None


TARGETS: dict[str, Target] = {
    "verify-n1-q64": Target("times faster than stock", 12, "min", LOOSE_ERROR, stock=True),
    "verify-n4-q64": Target("times faster than stock", 12, "min", LOOSE_ERROR, stock=True),
    "verify-n8-q64": Target("times faster than stock", 12, "min", LOOSE_ERROR, stock=True),
    "verify-n1-q16": Target("times faster than stock", 4, "min", LOOSE_ERROR, stock=True),
    "verify-exact-n1-q64": Target(
        "times faster than stock", 6, "min", TIGHT_ERROR, stock=True, of="verify-n1-q64"
    ),
    "verify-adversarial": Target("worst relative error", LOOSE_ERROR, "max", LOOSE_ERROR),
    "verify-adversarial-exact": Target(
        "worst relative error", TIGHT_ERROR, "max", TIGHT_ERROR, of="verify-adversarial"
    ),
    "conv-n1-q64": Target("times faster than stock", 10, "min", stock=True),
    "commit-n8": Target("times the floor", 2, "max"),
    "build-walk": Target("microseconds", 60, "max"),
    "memory-q64": Target("MiB", 64, "max"),
}


def measurement_of(name: str) -> str:
    """The measurement that a target reads; any other name is one itself."""
    target = TARGETS.get(name)
    return target.of or name if target else name


def sign(direction: str) -> str:
    """How a target reads."""
    return ">=" if direction == "min" else "<="


def summary(environment: dict[str, Any], results: dict[str, dict[str, Any]], raw: str) -> dict[str, Any]:
    """The targets with what was measured; a figure that could not be taken is null."""
    rows = []
    for name, target in TARGETS.items():
        measured = measurement_of(name)
        found = results.get(measured, {})
        milliseconds = found.get("milliseconds")
        floor = floor_milliseconds(found, results)
        stock = results.get("stock", {}).get(measured, {}).get("milliseconds")
        figure = found.get("figure")
        if target.stock:
            figure = stock / milliseconds if stock and milliseconds else None
        elif target.what == "times the floor":
            figure = milliseconds / floor if floor and milliseconds else None
        rows.append(
            {
                "id": name,
                "what": target.what,
                "figure": figure,
                "target": target.target,
                "direction": target.direction,
                "error": found.get("error"),
                "error_target": target.error,
                "milliseconds": milliseconds,
                "stock_milliseconds": stock,
                "floor_milliseconds": floor,
                "raw": raw,
            }
        )
    return {"schema": 1, **environment, "targets": rows}


def floor_milliseconds(found: dict[str, Any], results: dict[str, dict[str, Any]]) -> float | None:
    """The time to move a measurement's least bytes once, at the bandwidth of the same run."""
    bandwidth = results.get("bandwidth", {}).get("bytes_per_second")
    size = found.get("floor_bytes")
    return None if not bandwidth or not size else float(size) / float(bandwidth) * 1e3
