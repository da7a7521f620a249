"""Lay the trained pair out as package data: target/, drafter/, prompts, thinned curves, pair.json."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pair.checkpoint import assert_constant, load_drafter, load_target, write_json

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
PROMPTS = ("prompts.jsonl", "calibration-prompts.jsonl")
CURVE_EVERY = 500


def ship(work: Path, tokenizer: Path, prompts: Path, out: Path) -> dict[str, Any]:
    """Copy and check; returns what pair.json says. An existing CARD.md stays."""
    target, drafter = load_target(work / "target"), load_drafter(work / "drafter")
    assert_constant(target)
    assert_constant(drafter)
    for name in ("target", "drafter"):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in (work / name).iterdir():
            if path.suffix in (".json", ".safetensors") and path.name not in TOKENIZER:
                shutil.copyfile(path, folder / path.name)
    for name in TOKENIZER:
        shutil.copyfile(tokenizer.with_name(name), out / "target" / name)
    for name in PROMPTS:
        shutil.copyfile(prompts / name, out / name)
    for stage in ("target", "drafter"):
        thin(work / f"{stage}-curve.jsonl", out / f"{stage}-curve.jsonl")
    return write_manifest(out, target.shape.constant)


def write_manifest(out: Path, constant: int) -> dict[str, Any]:
    files = sorted(p for p in out.rglob("*") if p.is_file() and p.name not in ("pair.json", "CARD.md"))
    hashes = {p.relative_to(out).as_posix(): sha256(p) for p in files}
    manifest = {
        "schema": 1,
        "kind": "ddtree-test-pair",
        "version": 1,
        "licence": "Apache-2.0",
        "constant_channel": constant,
        "prompts_sha256": hashes["prompts.jsonl"],
        "calibration_prompts_sha256": hashes["calibration-prompts.jsonl"],
        "files": hashes,
    }
    write_json(out / "pair.json", manifest)
    return manifest


def thin(source: Path, target: Path) -> None:
    """Every CURVE_EVERY-th step and every line that is not a step."""
    kept = []
    for line in source.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" not in record or record["step"] % CURVE_EVERY == 0:
            kept.append(line)
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
