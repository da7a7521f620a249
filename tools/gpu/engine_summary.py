#!/usr/bin/env python3
"""Make the gates of results/h200-engine/summary.json from the archives that engine_plan.py brought back.

    .venv/bin/python tools/gpu/engine_summary.py results/h200-engine ARCHIVE.tar.xz [ARCHIVE.tar.xz ...] \
        [--wy ARCHIVE.tar.xz]

Unpacks every archive's answers into the folder's `raw/`, compressed and without logs (a later archive
replaces an arm's earlier answers), and computes each figure from those files, so that anybody can: with no
archive given, from `raw/` as it is. `--wy` takes a run of stage `wy` into `raw/wy/`, apart from the rest: its
prompts may be fewer. Gates whose arms did not run are left out and named.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any

from engine.answers import Missing, Raw, verdict
from engine.gates import GATES
from engine.serving_gates import SERVING_GATES

SCHEMA = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results folder; raw files go to its raw/")
    parser.add_argument("archives", type=Path, nargs="*", help="engine.tar.xz files, oldest first")
    parser.add_argument("--wy", type=Path, help="engine.tar.xz of a run with the arms of stage wy")
    options = parser.parse_args()
    raw = options.folder / "raw"
    for archive in options.archives:
        unpack(archive, raw)
    if options.wy is not None:
        unpack(options.wy, raw / "wy")
    summary, missing = summarise(Raw(raw))
    (options.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for gate in summary["gates"]:
        wanted = f"{gate['direction']} {gate['target']}"
        print(f"{gate['id']:>3}  {verdict(gate)}  {gate['figure']} ({wanted})  {gate['title']}")
    for gate, what in missing.items():
        print(f"{gate:>3}  not run: {what}", file=sys.stderr)
    return 0 if all(verdict(gate) == "ok  " for gate in summary["gates"]) else 1


def unpack(archive: Path, folder: Path) -> None:
    """Keep an archive's answers, compressed; no logs or excerpts of them, which name a machine's paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            path = Path(entry.name)
            named = path.name.endswith((".diagnosis.json", ".figures.json"))
            if content is not None and path.suffix == ".json" and not named:
                compressed = lzma.compress(content.read(), preset=9)
                (folder / f"{path.name}.xz").write_bytes(compressed)


def summarise(raw: Raw) -> tuple[dict[str, Any], dict[str, str]]:
    """(summary, {gate id: what it lacks})."""
    facts = raw.read("host", "facts")
    gates: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for make in (*GATES, *SERVING_GATES):
        try:
            gates += make(raw)
        except Missing as lacking:
            missing[make.__name__.removeprefix("gate_")] = str(lacking)
    served = {file.name.split(".")[0] for file in raw.folder.glob("*.greedy.json*")}
    return {
        "schema": SCHEMA,
        "hardware": {"cards": facts.get("cards"), "nvidia_smi": facts.get("nvidia_smi")},
        "versions": facts.get("versions", {}) | {"python": facts.get("python"), "cuda": facts.get("cuda")},
        "prompts_sha256": facts.get("prompts_sha256"),
        "arms": sorted(served),
        "gates": gates,
    }, missing


if __name__ == "__main__":
    raise SystemExit(main())
