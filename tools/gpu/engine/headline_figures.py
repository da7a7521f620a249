"""The figures of a headline run from what was answered (see `headline_plan.py`)."""

from __future__ import annotations

import random
import statistics
from typing import Any

from engine.ties import gap, is_near, noise

DRAWS = 2000
# Fewer groups give no interval; `ddtree_ops.compare` holds to the same number.
LEAST_GROUPS = 5
# Tokens of a long text that a drift is the mean of.
WINDOW = 500

Row = dict[str, Any]
# Group -> way -> its row.
Groups = dict[int, dict[str, Row]]


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Arm beside the trees -> its figures; `results` is arm -> workload -> value."""
    figures = {name: arm_figures(found) for name, found in results.items() if "about" in found}
    if "dflash-alone" in figures:
        figures["dflash-alone"] |= alone_figures(results)
    return figures


def arm_figures(results: dict[str, Any]) -> dict[str, Any]:
    """Step ratios, throughput ratios, stages, gaps and differences beside one arm."""
    figures: dict[str, Any] = {}
    for workload, rows in results.items():
        if not rows:
            continue
        if workload.startswith("steps"):
            figures |= step_figures(rows, workload.removeprefix("steps").replace("-", "_"))
        if workload.startswith("in-flight-"):
            figures[workload] = throughput_figures(rows)
        if workload == "stages-steps" and (found := stage_figures(*rows)):
            figures["stages"] = found
        if workload == "traces":
            figures[workload] = {way: gap_figures(trace) for way, trace in rows.items()}
        if workload == "long":
            figures[workload] = long_figures(rows)
    if results.get("differences"):
        figures["differences"] = difference_figures(results["differences"], results["noise"])
    return figures


def alone_figures(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """DFLASH that had the card to itself, held against what was asked in turns at another time.

    trees-N       the trees asked beside the chain, over it, by groups of N prompts
    same-again-4  itself over what it did beside the trees: how far such ratios can be trusted
    """
    figures: dict[str, Any] = {}
    for workload, rows in results["dflash-alone"].items():
        size = workload.removeprefix("in-flight-")
        if size == workload or not rows:
            continue
        others = results.get("chain", {}).get(workload, [])
        trees = [row for row in others if row["way"] != "linear"]
        if trees:
            figures[f"trees-{size}"] = throughput_figures([*rows, *trees])
        turns = [row for row in results.get("dflash", {}).get(workload, []) if row["way"] == "linear"]
        if turns:
            again = [{**row, "way": "alone"} for row in rows]
            figures[f"same-again-{size}"] = throughput_figures([*turns, *again])["ratio"]["alone"]
    return figures


def step_figures(rows: list[Row], suffix: str) -> dict[str, Any]:
    """Medians of the rounds, and of the ratios within a round."""
    ways = [way for way in rows[0] if way != "linear"]
    ratios = {way: [row[way] / row["linear"] for row in rows] for way in ways}
    return {
        f"step_ms{suffix}": {way: statistics.median(row[way] for row in rows) for way in rows[0]},
        f"step_ratio{suffix}": {
            way: {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
            for way, found in ratios.items()
        },
    }


def throughput_figures(rows: list[Row]) -> dict[str, Any]:
    """Ratios by way over all groups, and the best budget of even groups judged on odd ones."""
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] != "linear"))
    complete = _by_group(rows, ["linear", *ways])
    everything = list(complete.values())
    if not everything:
        return {"groups": 0}
    halves = [[group for number, group in complete.items() if number % 2 == rest] for rest in (0, 1)]
    budgets = [way for way in ways if way.isdigit()]
    found: dict[str, Any] = {"groups": len(everything)}
    found["accept_length"] = {
        way: sum(group[way]["tokens"] for group in everything) / steps
        for way in ("linear", *ways)
        if (steps := sum(group[way]["steps"] for group in everything))
    }
    found["ratio"] = {way: interval(everything, way) for way in ways}
    if all(halves) and budgets:
        picked, judged = halves
        best = max(budgets, key=lambda budget: ratio(picked, budget))
        found["best"] = {"budget": int(best), **interval(judged, best)}
    if "auto" in ways and budgets:
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


def stage_figures(before: dict[str, Row], after: dict[str, Row]) -> dict[str, Any]:
    """Width -> milliseconds of a step's stages, from the totals before and after; sampled steps."""
    figures: dict[str, Any] = {}
    for width, end in after.items():
        began = before.get(width) or {}
        steps = (end["sampled_steps"] or 0) - (began.get("sampled_steps") or 0)
        if steps:
            figures[width] = {"steps": steps} | {
                stage: 1e3
                * (
                    mean * end["sampled_steps"]
                    - (began.get("stage_seconds") or {}).get(stage, 0.0) * (began.get("sampled_steps") or 0)
                )
                / steps
                for stage, mean in end["stage_seconds"].items()
            }
    return figures


def gap_figures(trace: Row) -> dict[str, Any]:
    """Of a trace's time: the card idle at all, and in gaps that no graph explains; the longest kernels."""
    longest = sorted(trace["kernels"].items(), key=lambda one: -one[1][1])[:12]
    return {
        "idle_share": 1 - trace["busy"] / trace["span"],
        "host_gap_share": sum(trace["gaps"]) / trace["span"],
        "kernel_share": {name: spent / trace["busy"] for name, (_, spent) in longest},
    }


def long_figures(rows: list[Row]) -> dict[str, Any]:
    """Stored and replayed states: where the texts part, and by store how far decoding drifts from a prefill.

    drift  mean size of the difference of a token's log-probabilities, by `WINDOW` tokens
    """
    figures: dict[str, Any] = {"tokens": len(rows[0]["answers"]["wy"]["output_ids"])}
    figures["first_difference"] = [row["place"] for row in rows]
    figures["gap_there"] = [gap(row["best"], row["tokens"]) for row in rows if row["place"] is not None]
    for store in ("wy", "snapshot"):
        answers = [row["answers"][store] for row in rows]
        pairs = [list(zip(one["decoded"], one["fresh"], strict=True)) for one in answers]
        windows = range(0, max(map(len, pairs)), WINDOW)
        steps = sum(one["steps"] for one in answers)
        figures[store] = {
            "accept_length": sum(len(one["output_ids"]) for one in answers) / steps,
            "drift": [
                statistics.fmean(abs(x - y) for pair in pairs for x, y in pair[at : at + WINDOW])
                for at in windows
            ],
        }
    return figures


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
