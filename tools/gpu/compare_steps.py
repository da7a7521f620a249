#!/usr/bin/env python3
"""Gate e: the GPU server's accept lengths against the CPU engine's, teacher-forced, step by step.

    .venv/bin/python -m ddtree_engine.reference --arm ddtree --budget 31 --port 30003 &
    .venv/bin/python tools/gpu/compare_steps.py UNPACKED --out results/h200-engine/raw/cpu-steps.json.xz

UNPACKED is a folder with the files of an engine.tar.xz that has the arm `tree32-log`. Takes steps from its
step log (`tree32-log.steps/steps.jsonl`), gives the CPU engine (same pair) the GPU's own text up to each
step's root, and compares what its first step accepts. A step counts when both engines stand at one root.
What makes a step differ is told from the tokens: either the targets chose differently at a node (`target`;
margin: the GPU's two best tokens there), or they agree and one tree lacks the next node (`tree`; margin: how
far that node's score lies below the last one that the tree took). A margin within `--near` is a near-tie.
Each step's tree and walk are also made again from the GPU's own numbers, where nothing rounds. The rows go to
the file for engine_summary.py under the CPU engine's type, beside those of another type.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from ddtree_engine.tree.accept import walk
from ddtree_engine.tree.build import Builder, build_tree

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
    add(
        "--near",
        type=float,
        default=0.25,
        help="margin that bfloat16 may turn round: twice the measured noise",
    )
    add("--output", default="cpu-steps.json", help="file in the folder of answers")
    options = parser.parse_args()
    steps = read_steps(options.raw, options.arm)
    random.Random(0).shuffle(steps)
    rows = []
    for number, step in enumerate(steps[: options.steps]):
        rows.append(compare(options, step))
        if number % 50 == 49:
            print(f"{number + 1} steps, {sum(row['equal'] for row in rows)} equal", flush=True)
    keep(options, rows)
    counted = [row for row in rows if row["same_root"]]
    near = sum(row["near"] for row in counted if not row["equal"])
    equal = sum(row["equal"] for row in counted)
    print(f"{len(counted)} of {len(rows)} steps at the same root: {equal} equal, {near} differ at a near-tie")
    return 0


def keep(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Put the rows beside those of the other types."""
    with urllib.request.urlopen(options.server + "/server_info", timeout=60) as answer:
        dtype = json.load(answer)["ddtree"]["dtype"]
    document = json.loads(lzma.decompress(options.out.read_bytes())) if options.out.is_file() else {}
    document[dtype] = rows
    options.out.write_bytes(lzma.compress(json.dumps(document).encode(), preset=9))


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
    mine, theirs = step["ids"], taken[0]["ids"]
    row = {
        "rid": step["rid"],
        "prefix": step["prefix"],
        "same_root": same_root,
        "gpu": gpu,
        "cpu": cpu,
        "equal": cpu == gpu,
        "spine_equal": [row[0] for row in mine] == [row[0] for row in theirs],
        "best_candidates_shared": sum(
            len(set(row) & set(other)) for row, other in zip(mine, theirs, strict=True)
        ),
        **again(step, options.budget, options.builder),
    }
    if same_root and cpu != gpu:
        walked = [step["tokens"][node] for node in step["path"][1:gpu]] + [step["bonus"]]
        row |= why(step, taken[0], walked, data["output_ids"][1 : cpu + 1], options.budget)
        row["near"] = row["margin"] is not None and row["margin"] <= options.near
    return row


def again(step: dict[str, Any], budget: int, builder: str) -> dict[str, bool]:
    """Whether the tree core makes the GPU's tree of the GPU's candidates, and walks it as the GPU did."""
    tree = build_tree(step["tokens"][0], step["ids"], step["logprobs"], budget, Builder(builder))
    same = tree.tokens.tolist() == step["tokens"] and tree.parents.tolist() == step["parents"]
    if not same:
        return {"tree_equal": False, "walk_equal": False}
    path = step["path"][: step["accepted"]]
    taken = [step["tokens"][node] for node in path[1:]] + [step["bonus"]]
    choices = np.array([best[0] for best in step["best_ids"]])
    for node, token in zip(path, taken, strict=True):
        first, second = step["best_logprobs"][node]
        if first == second and token == step["best_ids"][node][1]:
            choices[node] = token  # equal logits have no order
    walked = walk(tree, choices)
    return {"tree_equal": True, "walk_equal": list(walked.path) == path and walked.bonus == step["bonus"]}


def why(
    step: dict[str, Any], table: dict[str, Any], gpu: list[int], cpu: list[int], budget: int
) -> dict[str, Any]:
    """What made one step end differently; `gpu` and `cpu` are the tokens that each engine emitted.

    `margin` is None where the node that a tree lacks is no candidate of its drafter at all.
    """
    common = 0
    while common < min(len(gpu), len(cpu)) and gpu[common] == cpu[common]:
        common += 1
    if common < min(len(gpu), len(cpu)):
        first, second = step["best_logprobs"][step["path"][common]]
        return {"cause": "target", "margin": first - second, "at": common}
    # The shorter walk's last token, which its target chose, is a node of the other's tree only.
    if len(gpu) < len(cpu):
        ids, logprobs, last = step["ids"], step["logprobs"], min(step["scores"])
    else:
        ids, logprobs = table["ids"], table["logprobs"]
        last = float(build_tree(step["tokens"][0], ids, logprobs, budget).scores.min())
    score = 0.0
    for token, candidates, values in zip(gpu[:common], ids, logprobs, strict=False):
        if token not in candidates:
            return {"cause": "tree", "margin": None, "at": common}
        score += values[candidates.index(token)]
    return {"cause": "tree", "margin": last - score, "at": common}


if __name__ == "__main__":
    sys.exit(main())
