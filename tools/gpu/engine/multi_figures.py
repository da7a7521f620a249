"""The figures of a run on several cards from what was answered (see `multi_plan.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.ties import gap, is_near, noise

TREE = "ddtree"
Row = dict[str, Any]
# Server or stage -> workload -> value.
Results = Mapping[str, Mapping[str, Any]]


def figures_of(results: Results) -> dict[str, Any]:
    """Everything that a run allows; what it did not measure is not there."""
    about = results["plan"]["about"]
    figures: dict[str, Any] = {"gpus": about["gpus"], "model": about["model"]}
    figures["layouts"] = [row for stage in _stages(results) for row in layout_rows(results, stage)]
    loads = results.get("replicas", {}).get("loads", [])
    if loads:
        figures["floor"] = floor_of(loads)
        figures["cross_talk"] = cross_talk(loads)
        figures["side_by_side"] = arms_by_card(loads, about["arms"])
    figures["parity"] = parity_of(results)
    figures["replicas_equal"] = replicas_equal(results)
    figures["cannot"] = {
        name: found["obstacle"] for name, found in results.items() if found.get("obstacle") is not None
    }
    if telemetry := results.get("host", {}).get("telemetry"):
        figures["cards"] = telemetry
    return figures


def _stages(results: Results) -> list[str]:
    return [name for name, found in results.items() if found.get("loads")]


def layout_rows(results: Results, stage: str) -> list[Row]:
    """Tokens a second of the whole host by layout and requests in flight, over the rounds of a stage."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in results[stage]["loads"]:
        groups.setdefault((row["layout"], row["in_flight"]), []).append(row)
    return [_layout_row(results, stage, name, rows) for (name, _), rows in groups.items()]


def _layout_row(results: Results, stage: str, name: str, rows: Sequence[Row]) -> Row:
    servers = sorted({server for row in rows for server in row["servers"]})
    replicas = len(rows[0]["servers"])
    tp = int(name.removeprefix("tp").partition("-")[0]) if name.startswith("tp") else 1
    rates = [sum(map(rate, row["servers"].values())) for row in rows]
    arms = sorted({server.partition("-")[0] for server in servers})
    return {
        "layout": name,
        "stage": stage,
        "arms": arms,
        "tp": tp,
        "replicas": replicas,
        "gpus": tp * replicas,
        "in_flight": rows[0]["in_flight"] * replicas,
        # Side by side every round has other arms: the mean counts all of them.
        "tokens_per_second": (statistics.fmean if len(arms) > 1 else statistics.median)(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "rounds": len(rows),
        "parity": _parity(_questions(results, servers), _noise(results)),
    }


def rate(row: Row) -> float:
    """Tokens a second of one server under one load."""
    return float(row["tokens"] / row["seconds"])


def floor_of(loads: Iterable[Row]) -> dict[str, Any]:
    """A/A: what one arm's replicas differ by, one request each: largest over smallest, less 1.

    between_cards   of the cards' medians
    between_rounds  of one card, the worst of them
    """
    by_server: dict[str, list[float]] = {}
    for row in loads:
        if (row["layout"], row["in_flight"]) == (f"all-{TREE}", 1):
            for name, found in row["servers"].items():
                by_server.setdefault(name, []).append(rate(found))
    if not by_server:
        return {}
    medians = {name: statistics.median(found) for name, found in by_server.items()}
    return {
        "tokens_per_second": medians,
        "between_cards": max(medians.values()) / min(medians.values()) - 1,
        "between_rounds": max(max(found) / min(found) - 1 for found in by_server.values()),
        "rounds": min(map(len, by_server.values())),
    }


def cross_talk(loads: Iterable[Row]) -> dict[str, Any]:
    """A card's rate with all cards busy over its rate alone, in the same round; one request each.

    `said` is the same by the seconds that servers say: what the load client itself loses is not in it.
    """
    rounds: dict[int, dict[str, dict[str, Row]]] = {}
    for row in loads:
        if row["in_flight"] == 1:
            rounds.setdefault(row["round"], {})[row["layout"]] = row["servers"]
    ratios, said = [], []
    for found in rounds.values():
        if {"alone", f"all-{TREE}"} <= set(found):
            ((name, alone),) = found["alone"].items()
            busy = found[f"all-{TREE}"][name]
            ratios.append(rate(busy) / rate(alone))
            one, other = (row["tokens"] / row["said_seconds"] for row in (busy, alone))
            said.append(one / other)
    return {"busy_over_alone": _spread(ratios), "said": _spread(said)} if ratios else {}


def arms_by_card(loads: Iterable[Row], arms: Sequence[str]) -> dict[str, Any]:
    """DDTREE's rate over another arm's on the same card, side by side with the others; one request each."""
    rates: dict[tuple[str, str], list[float]] = {}
    for row in loads:
        if (row["layout"], row["in_flight"]) == ("side-by-side", 1):
            for name, found in row["servers"].items():
                arm, _, card = name.partition("-")
                rates.setdefault((card, arm), []).append(rate(found))
    figures = {}
    for arm in arms:
        cards = [card for card, other in rates if other == arm and arm != TREE and (card, TREE) in rates]
        ratios = [
            statistics.median(rates[card, TREE]) / statistics.median(rates[card, arm]) for card in cards
        ]
        if ratios:
            figures[arm] = _spread(ratios)
    return figures


def parity_of(results: Results) -> dict[str, Any]:
    """By server: answers compared, equal ones, first differences that were near-ties, and the others."""
    measured = _noise(results)
    servers = list(dict.fromkeys(row["server"] for row in _questions(results)))
    found: dict[str, Any] = {name: _parity(_questions(results, [name]), measured) for name in servers}
    return {"noise": measured, "by_server": found}


def replicas_equal(results: Results) -> dict[str, list[int]]:
    """By arm with one rank a server: answers of further replicas that are the first one's, of how many."""
    first: dict[str, list[Row]] = {}
    counts: dict[str, list[int]] = {}
    for name, found in results.items():
        arm, _, place = name.partition("-")
        if "answers" not in found or not place.startswith("c"):
            continue
        if arm not in first:
            first[arm] = found["answers"]
            continue
        same = [a["output_ids"] == b["output_ids"] for a, b in zip(first[arm], found["answers"], strict=True)]
        equal, compared = counts.get(arm, [0, 0])
        counts[arm] = [equal + sum(same), compared + len(same)]
    return counts


def _noise(results: Results) -> float | None:
    return noise(results.get("replicas", {}).get("noise", []))


def _questions(results: Results, servers: Iterable[str] | None = None) -> list[Row]:
    rows = [row for found in results.values() for row in found.get("differences", [])]
    wanted = None if servers is None else set(servers)
    return [row for row in rows if wanted is None or row["server"] in wanted]


def _parity(rows: Sequence[Row], measured: float | None) -> Row | None:
    """None where nothing was compared; without a measured noise no difference is a near-tie."""
    if not rows:
        return None
    apart = [row for row in rows if row["place"] is not None]
    near = [row for row in apart if measured is not None and is_near(row, measured)]
    return {
        "against": sorted({row["against"] for row in rows}),
        "answers": len(rows),
        "equal": len(rows) - len(apart),
        "near_ties": len(near),
        "others": [
            [row["server"], row["prompt"], row["place"], gap(row["best"], row["tokens"])]
            for row in apart
            if row not in near
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "count": len(values),
    }
