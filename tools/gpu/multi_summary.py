#!/usr/bin/env python3
"""Make results/h200-multi/summary.json from the archives that multi_plan.py brought back.

    .venv/bin/python tools/gpu/multi_summary.py results/h200-multi [RUN=ARCHIVE.tar.xz ...]

Unpacks every archive's answers into `raw/RUN/`, compressed and without logs, and computes each figure from
those files: with no archive given, from `raw/` as it is. What a run did not measure is not in its figures,
and is named under `not_measured`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.cards import WIDTHS
from engine.multi_figures import figures_of
from headline_summary import load, unpacked

SCHEMA = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = unpacked(parser)
    if not list(folder.glob("raw/*/plan.about.json.xz")):
        parser.error(f"found no run in {folder / 'raw'}, allowed is a folder with one")
    found = summary(folder)
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["layouts"]:
        print(
            f"{row['run']:<8} {row['layout']:<14} {row['gpus']} GPUs, {row['in_flight']:>2} in flight: "
            f"{row['tokens_per_second']:.0f} tokens/s [{row['lowest']:.0f}, {row['highest']:.0f}]"
        )
    return 0


def summary(folder: Path) -> dict[str, Any]:
    """The summary of what lies in `folder/raw`: a layout names its run and the files that it comes from."""
    runs = {path.name: load(path) for path in sorted((folder / "raw").iterdir()) if path.is_dir()}
    figures = {run: figures_of(results) for run, results in runs.items()}
    layouts = []
    for run, found in figures.items():
        for row in found.pop("layouts"):
            names = [f"raw/{run}/{row['stage']}.{what}.json.xz" for what in ("loads", "differences", "noise")]
            raw = [name for name in names if (folder / name).is_file()]
            layouts.append({"run": run, **row, "raw": raw})
    facts = [results["host"]["facts"] for results in runs.values()]
    return {
        "schema": SCHEMA,
        "hardware": facts[0].get("cards"),
        "gpus": max(found["gpus"] for found in figures.values()),
        "versions": facts[0].get("versions"),
        "nvlink_multicast": "off",
        "layouts": layouts,
        "runs": figures,
        "not_measured": not_measured(layouts, figures),
    }


def not_measured(layouts: list[dict[str, Any]], figures: dict[str, Any]) -> dict[str, str]:
    """What the plan could measure on a host of eight cards, and why it is not here."""
    missing = {}
    gpus = max(found["gpus"] for found in figures.values())
    for tp in WIDTHS:
        if any(row["tp"] == tp for row in layouts):
            continue
        reasons = [found["cannot"][f"tp{tp}"] for found in figures.values() if f"tp{tp}" in found["cannot"]]
        why = f"the host had {gpus} GPUs" if tp > gpus else "; ".join(dict.fromkeys(reasons)) or "not run"
        missing[f"tp{tp}"] = why
    for figure in ("floor", "cross_talk", "side_by_side"):
        if not any(found.get(figure) for found in figures.values()):
            missing[figure] = "not run"
    return missing


if __name__ == "__main__":
    sys.exit(main())
