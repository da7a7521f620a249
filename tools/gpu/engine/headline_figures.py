"""The figures of a headline run from what was answered (see `headline_plan.py`)."""

from __future__ import annotations

import random
import statistics
from typing import Any

from engine.ties import gap, is_near, noise

DRAWS = 2000
# Fewer groups give no interval; `ddtree_ops.compare` holds to the same number.
LEAST_GROUPS = 5

Row = dict[str, Any]
# Group -> way -> its row.
Groups = dict[int, dict[str, Row]]


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Linear arm -> its figures; `results` is arm -> workload -> value."""
    return {name: arm_figures(found) for name, found in results.items() if "about" in found}


def arm_figures(results: dict[str, Any]) -> dict[str, Any]:
    """Step ratios, throughput ratios and differences against one linear arm."""
    figures: dict[str, Any] = {}
    ways = results["about"]["budgets"]
    for workload, rows in results.items():
        if workload.startswith("steps") and rows:
            figures |= step_figures(rows, ways, workload.removeprefix("steps").replace("-", "_"))
        if workload.startswith("in-flight-") and rows:
            figures[workload] = throughput_figures(rows, ways)
    if results.get("differences"):
        figures["differences"] = difference_figures(results["differences"], results["noise"])
    return figures


def step_figures(rows: list[Row], ways: list[str], suffix: str) -> dict[str, Any]:
    """Medians of the rounds, and of the ratios within a round."""
    ratios = {way: [row[way] / row["linear"] for row in rows] for way in ways}
    return {
        f"step_ms{suffix}": {way: statistics.median(row[way] for row in rows) for way in rows[0]},
        f"step_ratio{suffix}": {
            way: {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
            for way, found in ratios.items()
        },
    }


def throughput_figures(rows: list[Row], ways: list[str]) -> dict[str, Any]:
    """Ratios by way over all groups, and the best budget of even groups judged on odd ones."""
    complete = _by_group(rows, ["linear", *ways])
    everything = list(complete.values())
    if not everything:
        return {"groups": 0}
    halves = [[group for number, group in complete.items() if number % 2 == rest] for rest in (0, 1)]
    budgets = [way for way in ways if way != "auto"]
    found: dict[str, Any] = {"groups": len(everything)}
    found["accept_length"] = {
        way: sum(group[way]["tokens"] for group in everything) / steps
        for way in ("linear", *ways)
        if (steps := sum(group[way]["steps"] for group in everything))
    }
    found["ratio"] = {way: interval(everything, way) for way in ways}
    if all(halves):
        picked, judged = halves
        best = max(budgets, key=lambda budget: ratio(picked, budget))
        found["best"] = {"budget": int(best), **interval(judged, best)}
    if "auto" in ways:
        best = max(budgets, key=lambda budget: ratio(everything, budget))
        found["auto"] = {"budget": int(best), **interval(everything, "auto", best)}
    return found


def _by_group(rows: list[Row], ways: list[str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(row["group"], {})[row["way"]] = row
    return {number: group for number, group in groups.items() if set(ways) <= set(group)}


def ratio(groups: list[dict[str, Row]], way: str, over: str = "linear") -> float:
    """Tokens a second of a way over those of another, over these groups."""

    def rate(label: str) -> float:
        tokens = sum(group[label]["tokens"] for group in groups)
        return float(tokens / sum(group[label]["seconds"] for group in groups))

    return rate(way) / rate(over)


def interval(groups: list[dict[str, Row]], way: str, over: str = "linear") -> dict[str, float | None]:
    """The ratio with its 95 % bootstrap interval over groups of prompts, null for fewer than five."""
    if len(groups) < LEAST_GROUPS:
        return {"ratio": ratio(groups, way, over), "low": None, "high": None}
    rng = random.Random(0)
    draws = sorted(ratio(rng.choices(groups, k=len(groups)), way, over) for _ in range(DRAWS))
    low, high = draws[round(0.025 * DRAWS)], draws[round(0.975 * DRAWS) - 1]
    return {"ratio": ratio(groups, way, over), "low": low, "high": high}


def difference_figures(rows: list[Row], executions: list[Row]) -> dict[str, Any]:
    """By way: answers compared, answers equal to plain decoding's, first differences that were near-ties."""
    measured = noise(executions)
    by_way: dict[str, dict[str, Any]] = {}
    for row in rows:
        counts = by_way.setdefault(row["way"], {"answers": 0, "equal": 0, "near_ties": 0, "others": []})
        counts["answers"] += 1
        if row["place"] is None:
            counts["equal"] += 1
        elif measured is not None and is_near(row, measured):
            counts["near_ties"] += 1
        else:
            counts["others"].append([row["group"], row["place"], gap(row["best"], row["tokens"])])
    return {"noise": measured, "by_way": by_way}
