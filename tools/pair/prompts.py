"""Prompts from held-out files: windows that start at a `def` or `class` and end at a line end inside it.

A window is kept by the target's own greedy continuation alone (no loop, no early end, not mostly blank),
never by what a drafter makes of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pair.data import EOS, Streams
from pair.generate import greedy, loops
from pair.model import Target

COUNT = 40
CONTINUATION = 192
SHORTEST, LONGEST = 80, 200  # tokens
PER_PACKAGE = 4
OPENING = re.compile(r"^\s*(async def|def|class) \w+")


def choose(target: Target, streams: Streams, tokenizer: Any, count: int = 2 * COUNT) -> list[dict[str, Any]]:
    """The first `count` windows that pass, files in hash order; each with text, ids and continuation."""
    chosen: list[dict[str, Any]] = []
    per_package: Counter[str] = Counter()
    tried = 0
    for window in windows(streams, tokenizer):
        package = window["source"].split("==")[0]
        tried += 1
        if per_package[package] >= PER_PACKAGE:
            continue
        ids = torch.tensor([window["ids"]])
        out = greedy(target, ids, CONTINUATION, stop=degenerate)[0, len(window["ids"]) :].tolist()
        if degenerate(out) or blank_share(tokenizer.decode(out)) > 0.3:
            continue
        per_package[package] += 1
        chosen.append({**window, "continuation": out})
        if len(chosen) == count:
            print(f"{count} of {tried} windows kept", flush=True)
            return chosen
    raise RuntimeError(f"only {len(chosen)} of {count} windows pass")


def degenerate(out: list[int]) -> bool:
    return EOS in out or loops(out)


def windows(streams: Streams, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Up to three windows per held-out file, one file after another, then the second ones, and so on."""
    files = sorted(
        zip(streams.held_out, streams.held_out_sources, strict=True),
        key=lambda x: hashlib.sha256(f"{x[1]['package']}/{x[1]['path']}".encode()).hexdigest(),
    )
    for turn in range(3):
        for ids, source in files:
            text = tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False)
            window = cut(text, tokenizer, turn)
            if window:
                yield {
                    "text": window,
                    "ids": tokenizer.encode(window).ids,
                    "source": f"{source['package']} {source['path']}",
                    "licence": source["licence"],
                }


def cut(text: str, tokenizer: Any, turn: int) -> str | None:
    """The `turn`-th window of a file, or None."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if OPENING.match(line)]
    seed = int(hashlib.sha256(f"{turn}/{text}".encode()).hexdigest()[:8], 16)
    if len(starts) <= 2 * turn:
        return None
    first = starts[seed % len(starts)]
    wanted = SHORTEST + 20 + (seed >> 4) % (LONGEST - SHORTEST - 20)
    end = first + 1
    while end < len(lines) and len(tokenizer.encode("\n".join(lines[first : end + 1])).ids) <= wanted:
        end += 1
    while end > first and (not lines[end - 1].strip() or not lines[end - 1].startswith((" ", "\t"))):
        end -= 1
    window = "\n".join(lines[first:end])
    return window if SHORTEST <= len(tokenizer.encode(window).ids) <= LONGEST else None


def blank_share(text: str) -> float:
    lines = text.split("\n")
    return sum(not s.strip() for s in lines) / len(lines)


def write(path: Path, name: str, prompts: list[dict[str, Any]]) -> str:
    """One JSON object a line; returns the file's sha256."""
    with path.open("w", encoding="utf-8") as f:
        for i, p in enumerate(prompts):
            record = {
                "id": f"{name}-{i:02d}",
                "text": p["text"],
                "source": p["source"],
                "licence": p["licence"],
            }
            f.write(json.dumps(record, ensure_ascii=False) + "\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()
