"""Prompts from held-out files: windows that start at a `def` or `class` and end at a line end inside it.

A window is kept by the target's own greedy continuation alone: no early end, no loop, not mostly blank. Of
the windows kept, the half whose continuations repeat themselves least are the prompts, in that order; the
other half are for calibration. What a drafter makes of them is never looked at.
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
from pair.generate import MAX_PERIOD, loops, run_layers
from pair.model import Cache, Target
from torch.nn import functional

COUNT = 40
CONTINUATION = 192
SHORTEST, LONGEST = 80, 200  # tokens
PER_PACKAGE = 4
TURNS = 3  # windows per file
BATCH = 64
OPENING = re.compile(r"^\s*(async def|def|class) \w+")


def choose(
    target: Target, streams: Streams, tokenizer: Any, part: tuple[int, int] = (0, 1)
) -> list[dict[str, Any]]:
    """All windows (of part k of n) with their continuation, or None where it ended early or looped."""
    found = list(windows(streams, tokenizer))
    order = sorted(range(len(found)), key=lambda i: (len(found[i]["ids"]), i))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)][part[0] :: part[1]]
    out = []
    for batch in batches:
        made = continue_all(target, [found[i]["ids"] for i in batch])
        out += [{"index": i, **found[i], "continuation": made[n]} for n, i in enumerate(batch)]
        print(len(out), sum(x["continuation"] is not None for x in out), flush=True)
    return out


def select(tried: list[dict[str, Any]], tokenizer: Any, count: int = 2 * COUNT) -> list[dict[str, Any]]:
    """The first `count` windows, in the order of `windows`, that pass; the most varied continuation first."""
    chosen: list[dict[str, Any]] = []
    per_package: Counter[str] = Counter()
    for window in sorted(tried, key=lambda x: x["index"]):
        package, out = window["source"].split("==")[0], window["continuation"]
        if out is None or per_package[package] >= PER_PACKAGE:
            continue
        if blank_share(tokenizer.decode(out)) > 0.3:
            continue
        per_package[package] += 1
        chosen.append(window)
    if len(chosen) < count:
        raise RuntimeError(f"only {len(chosen)} of {count} windows pass, of {len(tried)}")
    # A small model repeats itself with small changes, which no search for exact loops finds.
    return sorted(chosen[:count], key=lambda x: -distinct_share(x["continuation"]))


@torch.no_grad()
def continue_all(target: Target, prompts: list[list[int]]) -> list[list[int] | None]:
    """Greedy continuations; None for those that end early or loop. One batch, prompts fed token by token past
    the shortest one's end, so that no row needs padding; rows that are done leave every 16 tokens."""
    shortest = min(map(len, prompts))
    rows = list(range(len(prompts)))
    texts = [list(p) for p in prompts]
    results: list[list[int] | None] = [None] * len(prompts)
    cache = Cache(room=max(map(len, prompts)) + CONTINUATION)
    ids = torch.tensor([p[:shortest] for p in prompts])
    for position in range(shortest, cache.room):
        hidden = run_layers(target, ids, cache)
        best = functional.linear(hidden[:, -1], target.embed_tokens.weight).argmax(-1).tolist()
        for row, token in zip(rows, best, strict=True):
            if len(texts[row]) == position:
                texts[row].append(token)
        if position % 16 == 0 or position == cache.room - 1:
            keep = []
            for n, row in enumerate(rows):
                out = texts[row][len(prompts[row]) :]
                if degenerate(out[:CONTINUATION]):
                    continue
                if len(out) >= CONTINUATION:
                    results[row] = out[:CONTINUATION]
                else:
                    keep.append(n)
            if not keep:
                break
            narrow(cache, keep)
            rows = [rows[n] for n in keep]
        ids = torch.tensor([[texts[row][position]] for row in rows])
    return results


def narrow(cache: Cache, keep: list[int]) -> None:
    index = torch.tensor(keep)
    for store in (cache.recurrent, cache.conv, cache.keys, cache.values):
        for layer, value in store.items():
            store[layer] = value[index]


def degenerate(out: list[int]) -> bool:
    return EOS in out or loops(out, max_period=MAX_PERIOD)


def distinct_share(ids: list[int], n: int = 4) -> float:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def windows(streams: Streams, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Up to TURNS windows per held-out file, one file after another, then the second ones, and so on."""
    files = sorted(
        zip(streams.held_out, streams.held_out_sources, strict=True),
        key=lambda x: hashlib.sha256(f"{x[1]['package']}/{x[1]['path']}".encode()).hexdigest(),
    )
    for turn in range(TURNS):
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
