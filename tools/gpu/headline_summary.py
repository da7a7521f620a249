#!/usr/bin/env python3
"""Make results/h200-27b/summary.json from the archives that headline_plan.py brought back.

    .venv/bin/python tools/gpu/headline_summary.py results/h200-27b [RUN=ARCHIVE.tar.xz ...]

Unpacks every archive's answers into `raw/RUN/`, compressed and without logs, and computes each figure from
those files, so that anybody can: with no archive given, from `raw/` as it is. Of a section that several runs
have, the newest counts. A target that no run measured is null, with the reason; `not_run` names every section
of the plan that no run has. `projections` is computed from the figures and results/h200-kernels, and nothing
in it was measured.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.headline_figures import figures_of, interval
from engine.headline_sections import SECTIONS, Section
from projections import projections

SCHEMA = 1
LINEAR = ("dflash", "chain", "ar")
# What steps are compared with: SGLang's own kernels.
STOCK = "dflash"
STEP_TARGETS = {"16": 1.02, "32": 1.05, "64": 1.08}
UNMEASURED = {
    "bed-over-dummy": (
        "step of the bed over one of random weights",
        1.01,
        "max",
        "bed_plan.py was not run on a card",
    ),
}

# Arm -> workload -> value; an arm's `runs` are the folders that its workloads come from.
Results = dict[str, dict[str, Any]]


def main() -> int:
    folder = unpacked(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    found = summary(folder)
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["targets"]:
        print(f"{row['id']:<28} {row['figure']} ({row['direction']} {row['target']}) {row['detail']}")
    return 0


def unpacked(parser: argparse.ArgumentParser) -> Path:
    """The results folder of the command line, with its archives unpacked into it."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("archives", nargs="*", metavar="RUN=ARCHIVE", help="runs to unpack first")
    options = parser.parse_args()
    folder: Path = options.folder
    for pair in options.archives:
        run, _, archive = pair.partition("=")
        if not archive or not run.isidentifier():
            parser.error(f"found {pair!r}, allowed is RUN=ARCHIVE with a plain name")
        unpack(Path(archive), folder / "raw" / run)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """The answers of an archive, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for entry in tar:
            if entry.name.endswith(".json") and entry.name != "figures.json":
                file = tar.extractfile(entry)
                assert file is not None
                (folder / f"{entry.name}.xz").write_bytes(lzma.compress(file.read()))


def load(folder: Path) -> Results:
    """A run's answers: arm -> workload -> value."""
    found: Results = {}
    for path in sorted(folder.glob("*.json.xz")):
        arm, _, workload = path.name.removesuffix(".json.xz").partition(".")
        found.setdefault(arm, {})[workload] = json.loads(lzma.decompress(path.read_bytes()))
    return found


def newest(folder: Path) -> Results:
    """Of every arm's workloads the newest run's answers."""
    found = [(run.name, load(run)) for run in folder.iterdir()]
    merged: Results = {}
    for name, run in sorted(found, key=lambda pair: pair[1]["host"]["facts"]["time"]):
        for arm, workloads in run.items():
            mine = merged.setdefault(arm, {"runs": {}})
            mine["runs"] |= dict.fromkeys(workloads, name)
            mine |= workloads
    return merged


def summary(folder: Path) -> dict[str, Any]:
    """The summary of what lies in `folder/raw`."""
    results = newest(folder / "raw")
    figures = figures_of(results)
    facts = results["host"]["facts"]
    linear = fastest_linear(figures)
    best = figures[linear]["in-flight-1"]["best"]
    over_ar = over_plain(results["ar"], figures["ar"]["in-flight-1"], best["budget"])
    return {
        "schema": SCHEMA,
        "hardware": facts["cards"],
        "versions": facts["versions"] | {"cuda": facts["cuda"], "python": facts["python"]},
        "prompts_sha256": facts["prompts_sha256"],
        "headline": {
            "ddtree_over_best_linear": best | {"linear_arm": linear},
            "ddtree_over_ar": over_ar,
        },
        "step_ratio": {
            width: figures[STOCK]["step_ratio"][str(int(width) - 1)]["median"] for width in STEP_TARGETS
        },
        "auto_worst_ratio": min(found["ratio"] for found in autos(figures).values()),
        "targets": targets(results, figures, linear, over_ar),
        "not_run": [section.name for section in SECTIONS if not ran(results, section)],
        "projections": projections(figures),
        "figures": figures,
    }


def ran(results: Results, section: Section) -> bool:
    """Whether a run has answers of a section; differences are kept as plain decoding's."""
    if section.kind != "differences":
        return bool(results.get(section.beside, {}).get(section.workload))
    ways = {row["way"] for row in results.get("ar", {}).get("differences", [])}
    return bool(ways) if section.beside == "ar" else section.beside in ways


def fastest_linear(figures: dict[str, Any]) -> str:
    """The linear arm that the trees gain least on, of those that were measured."""
    measured = [
        name for name in LINEAR if "31" in figures.get(name, {}).get("in-flight-1", {}).get("ratio", {})
    ]
    return min(measured, key=lambda name: figures[name]["in-flight-1"]["ratio"]["31"]["ratio"])


def autos(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Budget auto over the best fixed arm by linear arm and requests at once, where both were measured.

    The best fixed arm is a budget, or the linear one where that is faster than `auto`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in LINEAR:
        for workload, section in figures.get(name, {}).items():
            if workload.startswith("in-flight-") and "auto" in section:
                linear = {"budget": name, **section["ratio"]["auto"]}
                found[f"{name}.{workload}"] = min(section["auto"], linear, key=lambda one: one["ratio"])
    return found


def over_plain(results: dict[str, Any], figures: dict[str, Any], budget: int) -> dict[str, Any]:
    """The ratio over plain decoding at a budget, or at the best of those asked beside it."""
    if str(budget) not in figures["ratio"]:
        budget = max(
            (way for way in figures["ratio"] if way.isdigit()), key=lambda way: figures["ratio"][way]["ratio"]
        )
    return interval(complete(results, budget), str(budget)) | {"budget": int(budget)}


def complete(results: dict[str, Any], budget: int | str) -> list[dict[str, Any]]:
    """Groups of one in flight that both ways were asked."""
    groups: dict[int, dict[str, Any]] = {}
    for row in results["in-flight-1"]:
        groups.setdefault(row["group"], {})[row["way"]] = row
    return [group for group in groups.values() if {"linear", str(budget)} <= set(group)]


def targets(
    results: Results, figures: dict[str, Any], linear: str, over_ar: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every target with what was found."""

    def raw(arm: str, workload: str) -> str:
        return f"raw/{results[arm]['runs'][workload]}/{arm}.{workload}.json.xz"

    steps = figures[STOCK]["step_ratio"]
    best = figures[linear]["in-flight-1"]["best"]
    where, auto = min(autos(figures).items(), key=lambda pair: pair[1]["ratio"])
    rows = [
        row(
            f"step-q{width}-over-{STOCK}",
            "step time, times DFLASH's on SGLang's kernels: what accept length has to gain",
            steps[str(int(width) - 1)]["median"],
            target,
            "max",
            "rounds {lowest:.3f} to {highest:.3f}".format(**steps[str(int(width) - 1)]),
            raw(STOCK, "steps"),
        )
        for width, target in STEP_TARGETS.items()
    ]
    rows += [
        row(
            "ddtree-over-best-linear",
            "tokens a second, times the fastest linear arm's, one request at a time",
            best["ratio"],
            1.15,
            "min",
            f"budget {best['budget']} over {linear}, {ends(best)}; "
            "picked on every other prompt, judged on the rest",
            raw(linear, "in-flight-1"),
        ),
        row(
            "ddtree-over-ar",
            "tokens a second, times plain decoding's",
            over_ar["ratio"],
            2,
            "min",
            f"budget {over_ar['budget']}, {figures['ar']['in-flight-1']['groups']} prompts, {ends(over_ar)}",
            raw("ar", "in-flight-1"),
        ),
        row(
            "auto-over-best-fixed",
            "tokens a second of budget auto, times the best fixed budget's",
            auto["ratio"],
            0.98,
            "min",
            f"the worst of {', '.join(autos(figures))}; best in hindsight {auto['budget']}, {ends(auto)}",
            raw(*where.split(".", 1)),
        ),
        differences_row(figures["ar"]["differences"], raw("ar", "differences")),
        gap_row(figures, raw),
        memory_row(results, raw),
    ]
    rows += [
        row(name, what, None, target, direction, reason, None)
        for name, (what, target, direction, reason) in UNMEASURED.items()
    ]
    return rows


def ends(found: dict[str, Any]) -> str:
    """A ratio's interval, or that there is none."""
    if found["low"] is None:
        return "too few prompts for an interval"
    return f"[{found['low']:.3f}, {found['high']:.3f}]"


def gap_row(figures: dict[str, Any], raw: Callable[[str, str], str]) -> dict[str, Any]:
    traces = {
        way: found["host_gap_share"]
        for way, found in figures.get(STOCK, {}).get("traces", {}).items()
        if way.isdigit()
    }
    what = "share of a step in which the card waits for the host, at the budget where it is largest"
    if not traces:
        return row("host-gap", what, None, 0.05, "max", "no trace of a step was taken", None)
    worst = max(traces, key=lambda way: traces[way])
    detail = f"budget {worst} of {', '.join(traces)}, one request; under the profiler, which adds to it"
    return row("host-gap", what, traces[worst], 0.05, "max", detail, raw(STOCK, "traces"))


def memory_row(results: Results, raw: Callable[[str, str], str]) -> dict[str, Any]:
    """The trees' server alone on the card, after it has served eight requests of 64 nodes."""
    what = "GiB of the card with the weights"
    served = [row for row in results.get("chain", {}).get("in-flight-8", []) if row["way"] == "63"]
    rows = results["host"].get("memory", [])
    alone = [row["used_mib"] for row in rows if row["when"] == "ddtree alone" and row["used_mib"]]
    if not served or not alone:
        reason = "no server had eight requests of 64 nodes in flight"
        return row("memory-n8-q64", what, None, 96, "max", reason, None)
    used = round(max(int(one[0]) for one in alone) / 1024, 1)
    config = "its pools and graphs are those of 16 requests and 128 nodes"
    return row("memory-n8-q64", what, used, 96, "max", config, raw("host", "memory"))


def differences_row(found: dict[str, Any], raw: str) -> dict[str, Any]:
    others = {way: counts["others"] for way, counts in found["by_way"].items() if counts["others"]}
    answers, equal, near = (
        sum(counts[key] for counts in found["by_way"].values()) for key in ("answers", "equal", "near_ties")
    )
    return row(
        "wrong-tokens",
        "greedy answers whose first difference from plain decoding is no near-tie",
        sum(len(rows) for rows in others.values()),
        0,
        "max",
        f"{answers} answers, {equal} equal, {near} with a near-tie first (noise {found['noise']})",
        raw,
    )


def row(
    name: str,
    what: str,
    figure: float | None,
    target: float,
    direction: str,
    detail: str,
    raw: str | None,
) -> dict[str, Any]:
    """One target; `raw` is the file that its figure comes from."""
    return {
        "id": name,
        "what": what,
        "figure": figure,
        "target": target,
        "direction": direction,
        "detail": detail,
        "raw": raw,
    }


if __name__ == "__main__":
    sys.exit(main())
