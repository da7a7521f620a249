#!/usr/bin/env python3
"""Make results/h200-27b/summary.json from the archives that headline_plan.py brought back.

    .venv/bin/python tools/gpu/headline_summary.py results/h200-27b [RUN=ARCHIVE.tar.xz ...]

Unpacks every archive's answers into `raw/RUN/`, compressed and without logs, and computes each figure from
those files, so that anybody can: with no archive given, from `raw/` as it is. Of an arm that several runs
have, the newest counts. A target that no run measured is null, with the reason.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any

from engine.headline_figures import figures_of, interval

SCHEMA = 1
LINEAR = ("dflash", "chain", "ar")
STEP_TARGETS = {"16": 1.02, "32": 1.05, "64": 1.08}
UNMEASURED = {
    "host-gap": ("share of a step", 0.05, "max", "no profile of a step was taken on the bed"),
    "memory-n8-q64": ("GiB with the weights", 96, "max", "servers of this run held four requests"),
    "bed-over-dummy": (
        "step of the bed over one of random weights",
        1.01,
        "max",
        "bed_plan.py was not run on a card",
    ),
}

# Arm -> workload -> value; an arm's `run` is the folder that it comes from.
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
    """Of every arm the newest run's answers."""
    runs = [(run.name, load(run)) for run in folder.iterdir()]
    merged: Results = {}
    for name, run in sorted(runs, key=lambda pair: pair[1]["host"]["facts"]["time"]):
        merged |= {arm: found | {"run": name} for arm, found in run.items()}
    return merged


def summary(folder: Path) -> dict[str, Any]:
    """The summary of what lies in `folder/raw`."""
    results = newest(folder / "raw")
    figures = figures_of(results)
    facts = results["host"]["facts"]
    linear = fastest_linear(figures)
    best = figures[linear]["in-flight-1"]["best"]
    over_ar = interval(complete(results["ar"], best["budget"]), str(best["budget"]))
    over_ar["budget"] = best["budget"]
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
            width: figures[linear]["step_ratio"][str(int(width) - 1)]["median"] for width in STEP_TARGETS
        },
        "auto_worst_ratio": min(found["ratio"] for found in autos(figures).values()),
        "targets": targets(figures, linear, over_ar, {arm: found["run"] for arm, found in results.items()}),
        "figures": figures,
    }


def fastest_linear(figures: dict[str, Any]) -> str:
    """The linear arm that the trees gain least on, of those that were measured."""
    measured = [name for name in LINEAR if "in-flight-1" in figures.get(name, {})]
    return min(measured, key=lambda name: figures[name]["in-flight-1"]["ratio"]["31"]["ratio"])


def autos(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Budget auto over the best fixed one by linear arm and requests at once, where both were measured."""
    return {
        f"{name}.{workload}": found["auto"]
        for name, arm in figures.items()
        for workload, found in arm.items()
        if workload.startswith("in-flight-") and "auto" in found
    }


def complete(results: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    """Groups of one in flight that both ways were asked."""
    groups: dict[int, dict[str, Any]] = {}
    for row in results["in-flight-1"]:
        groups.setdefault(row["group"], {})[row["way"]] = row
    return [group for group in groups.values() if {"linear", str(budget)} <= set(group)]


def targets(
    figures: dict[str, Any], linear: str, over_ar: dict[str, Any], runs: dict[str, str]
) -> list[dict[str, Any]]:
    """Every target with what was found."""

    def raw(arm: str, workload: str) -> str:
        return f"raw/{runs[arm]}/{arm}.{workload}.json.xz"

    against = figures[linear]
    steps, alone = against["step_ratio"], against["in-flight-1"]
    best = alone["best"]
    where, auto = min(autos(figures).items(), key=lambda pair: pair[1]["ratio"])
    rows = [
        row(
            f"step-q{width}-over-{linear}",
            "step time, times the linear arm's: what accept length has to gain",
            steps[str(int(width) - 1)]["median"],
            target,
            "max",
            "rounds {lowest:.3f} to {highest:.3f}".format(**steps[str(int(width) - 1)]),
            raw(linear, "steps"),
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
            raw(*where.split(".")),
        ),
        differences_row(figures["ar"]["differences"], raw("ar", "differences")),
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
