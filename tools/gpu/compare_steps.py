#!/usr/bin/env python3
"""Gate e: the GPU server's accept lengths against the CPU engine's, teacher-forced, step by step.

    .venv/bin/python -m ddtree_engine.reference --arm ddtree --budget 31 --port 30003 &
    .venv/bin/python tools/gpu/compare_steps.py results/h200-engine/raw --server http://127.0.0.1:30003

Takes steps from the GPU's step log (`tree32-log.steps/steps.jsonl`), gives the CPU engine (same pair)
the GPU's own text up to each step's root, and compares what its first step accepts. A step counts when both
engines stand at the same root; a differing one is a near-tie when the GPU's two best tokens at the node where
the walks part lie within `--near` of each other. Writes `cpu-steps.json` for engine_summary.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

EXTRA = 4  # tokens past the block, so that the CPU engine takes a second step and shows where the first ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("raw", type=Path, help="folder with the unpacked answers")
    add("--arm", default="tree32-log")
    add("--server", default="http://127.0.0.1:30003")
    add("--budget", type=int, default=31)
    add("--builder", default="best-first")
    add("--steps", type=int, default=400, help="how many to sample")
    add("--near", type=float, default=0.125, help="gap of log-probabilities that bfloat16 may turn round")
    options = parser.parse_args()
    steps = read_steps(options.raw, options.arm)
    random.Random(0).shuffle(steps)
    rows = []
    for number, step in enumerate(steps[: options.steps]):
        rows.append(compare(options, step))
        if number % 50 == 49:
            print(f"{number + 1} steps, {sum(row['equal'] for row in rows)} equal", flush=True)
    (options.raw / "cpu-steps.json").write_text(json.dumps(rows))
    counted = [row for row in rows if row["same_root"]]
    near = sum(row["near"] for row in counted if not row["equal"])
    equal = sum(row["equal"] for row in counted)
    print(f"{len(counted)} of {len(rows)} steps at the same root: {equal} equal, {near} differ at a near-tie")
    return 0


def read_steps(raw: Path, arm: str) -> list[dict[str, Any]]:
    """Steps of the greedy workload, each with all tokens before its root."""
    prompts = json.loads((raw / "host.prompts.json").read_text())
    outputs = json.loads((raw / f"{arm}.greedy.json").read_text())
    by_rid = {row["rid"]: ids + row["output_ids"] for ids, row in zip(prompts, outputs, strict=True)}
    steps = []
    for line in (raw / f"{arm}.steps" / "steps.jsonl").open():
        step = json.loads(line)
        text = by_rid.get(step["rid"])
        if text is None or step["prefix"] + step["accepted"] >= len(text):
            continue  # not of this workload, or cut off by the end of the request
        if text[step["prefix"]] != step["tokens"][0]:
            raise SystemExit(f"{step['rid']}: the log and the answer disagree at token {step['prefix']}")
        step["text"] = text
        steps.append(step)
    return steps


def compare(options: argparse.Namespace, step: dict[str, Any]) -> dict[str, Any]:
    prefix, root, gpu = step["text"][: step["prefix"]], step["tokens"][0], step["accepted"]
    positions = len(step["ids"])
    body = {
        "input_ids": prefix,
        "sampling_params": {
            "max_new_tokens": positions + 2 + EXTRA,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {
                "ddtree_budget": options.budget,
                "ddtree_builder": options.builder,
                "ddtree_return_steps": True,
            },
        },
    }
    request = urllib.request.Request(
        options.server + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        data = json.load(answer)
    taken = data["meta_info"]["ddtree"]["steps"]
    same_root = data["output_ids"][0] == root
    cpu = taken[1]["anchor"] - taken[0]["anchor"]
    # The walks share their first nodes; at the last of them the two chose differently.
    node = step["path"][min(cpu, gpu) - 1]
    first, second = step["best_logprobs"][node]
    mine, theirs = step["ids"], taken[0]["ids"]
    return {
        "rid": step["rid"],
        "prefix": step["prefix"],
        "same_root": same_root,
        "gpu": gpu,
        "cpu": cpu,
        "equal": cpu == gpu,
        "gap": first - second,
        "near": first - second <= options.near,
        "spine_equal": [row[0] for row in mine] == [row[0] for row in theirs],
        "best_candidates_shared": sum(
            len(set(row) & set(other)) for row, other in zip(mine, theirs, strict=True)
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
