"""What the kernels have to reach, and the summary that holds it against what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FAST_ERROR, EXACT_ERROR = 3e-3, 1e-4


@dataclass(frozen=True)
class Target:
    """One row of the summary. `figure` is what is measured in the unit that `what` names."""

    what: str
    target: float
    direction: str
    error: float | None = None
    stock: bool = False


TARGETS: dict[str, Target] = {
    "verify-n1-q64": Target("times faster than stock", 12, "min", FAST_ERROR, stock=True),
    "verify-n4-q64": Target("times faster than stock", 12, "min", FAST_ERROR, stock=True),
    "verify-n8-q64": Target("times faster than stock", 12, "min", FAST_ERROR, stock=True),
    "verify-n1-q16": Target("times faster than stock", 4, "min", FAST_ERROR, stock=True),
    "verify-exact-n1-q64": Target("times faster than stock", 6, "min", EXACT_ERROR, stock=True),
    "verify-adversarial": Target("worst relative error", FAST_ERROR, "max", FAST_ERROR),
    "verify-adversarial-exact": Target("worst relative error", EXACT_ERROR, "max", EXACT_ERROR),
    "conv-n1-q64": Target("times faster than stock", 10, "min", stock=True),
    "commit-n8": Target("times the floor", 2, "max"),
    "build-walk": Target("microseconds", 60, "max"),
    "memory-q64": Target("MiB", 64, "max"),
}


def sign(direction: str) -> str:
    """How a target reads."""
    return ">=" if direction == "min" else "<="


def summary(environment: dict[str, Any], results: dict[str, dict[str, Any]], raw: str) -> dict[str, Any]:
    """The targets with what was measured; a figure that could not be taken is null."""
    rows = []
    for name, target in TARGETS.items():
        found = results.get(name, {})
        milliseconds = found.get("milliseconds")
        floor = floor_milliseconds(found, results)
        stock = results.get("stock", {}).get(name, {}).get("milliseconds")
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
