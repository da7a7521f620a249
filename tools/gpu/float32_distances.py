#!/usr/bin/env python3
"""How far the GPU's numbers are from float32's, for trees and for plain decoding: is a tree noisier?

    .venv/bin/python -m ddtree_engine.reference --arm ddtree --dtype float32 --port 30003 &
    .venv/bin/python tools/gpu/float32_distances.py UNPACKED --out RESULTS/raw/float32-distances.json.xz

UNPACKED is a folder with the files of an engine.tar.xz that has the arms `ar` and `tree32-log`. Compared is
the distance of the GPU's two best tokens with the same two tokens' distance on the CPU engine after the same
text: for accepted nodes from the step log, for decode and prefill from the answers about ties. One row
`[gpu, float32]` an execution, by kind.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare_steps import read_steps
from engine import ties

# Best tokens asked of the CPU engine; the GPU's two are among them unless float32 disagrees by far.
ASKED = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("raw", type=Path, help="folder with the unpacked answers")
    add("--server", default="http://127.0.0.1:30003")
    add("--out", type=Path, default=Path("float32-distances.json.xz"))
    options = parser.parse_args()
    prompts = json.loads((options.raw / "host.prompts.json").read_text())
    rows: dict[str, list[list[float]]] = {"tree": [], "decode": [], "prefill": []}
    for text, executions in [*of_trees(options.raw), *of_ties(options.raw, prompts)]:
        exact = float32(options.server, text, min(place for _, place, _ in executions))
        for kind, place, best in executions:
            gpu = best[0][0] - best[1][0]
            cpu = ties.distance(exact[place], best[0][1], best[1][1])
            if cpu is not None:
                rows[kind].append([round(gpu, 4), round(cpu, 4)])
    options.out.write_bytes(lzma.compress(json.dumps(rows).encode(), preset=9))
    for kind, pairs in rows.items():
        errors = sorted(abs(gpu - cpu) for gpu, cpu in pairs)
        print(f"{kind}: {len(errors)}, median {errors[len(errors) // 2]:.4f}, largest {errors[-1]:.4f}")
    return 0


# (kind, place of the token that is chosen, best tokens) of one text.
Executions = list[tuple[str, int, ties.Best]]


def of_trees(raw: Path) -> Iterator[tuple[list[int], Executions]]:
    """Accepted nodes, by text."""
    texts: dict[str, tuple[list[int], Executions]] = {}
    for step in read_steps(raw, "tree32-log"):
        _, executions = texts.setdefault(step["rid"], (step["text"], []))
        for depth, node in enumerate(step["path"][: step["accepted"]]):
            pairs = zip(step["best_logprobs"][node], step["best_ids"][node], strict=True)
            executions.append(("tree", step["prefix"] + depth + 1, [list(pair) for pair in pairs]))
    yield from texts.values()


def of_ties(raw: Path, prompts: list[list[int]]) -> Iterator[tuple[list[int], Executions]]:
    """Decode and prefill of the same prefixes: nine places a prompt, as the plan's `ties` asks."""
    outputs = [row["output_ids"] for row in json.loads((raw / "ar.greedy.json").read_text())]
    places = range(1, 64, 7)
    rows = [row for row in json.loads((raw / "ar.ties.json").read_text()) if "prefill" in row]
    for number in range(len(rows) // len(places)):
        mine = rows[number * len(places) : (number + 1) * len(places)]
        start = len(prompts[number])
        yield (
            prompts[number] + outputs[number][:64],
            [
                (kind, start + place, row[kind])
                for place, row in zip(places, mine, strict=True)
                for kind in ("decode", "prefill")
            ],
        )


def float32(server: str, text: list[int], first: int) -> dict[int, ties.Best]:
    """Best tokens for every place of a text from `first` on."""
    body: dict[str, Any] = {
        "input_ids": text,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "top_logprobs_num": ASKED,
    }
    request = urllib.request.Request(
        server + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)["meta_info"]["input_top_logprobs"]
    return {first - 1 + index: best for index, best in enumerate(found) if best}


if __name__ == "__main__":
    sys.exit(main())
