"""The gates of what a tree computes: DFLASH's tokens, logits, parity, accept lengths, kernels, states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from engine.answers import (
    Raw,
    accept_length,
    chain_accept_length,
    gate,
    no_near_ties,
    parity,
    share_identical,
)

TREES = ("tree8", "tree16", "tree32", "tree64")


def gate_a(raw: Raw) -> list[dict[str, Any]]:
    figure, detail = share_identical(raw, "shadow", "dflash")
    detail["shadow"] = {
        key: raw.described("shadow").get(key) for key in ("shadow_steps", "shadow_accept_length")
    }
    source = raw.named("shadow.greedy.json")
    return [gate("a", "shadow's text is DFLASH's, token for token", figure, 1.0, "equal", detail, source)]


def gate_b(raw: Raw) -> list[dict[str, Any]]:
    figure, detail = share_identical(raw, "chain", "dflash")
    detail["accept_length"] = {arm: accept_length(raw, arm) for arm in ("chain", "dflash")}
    title = "one candidate a position at the block's width is DFLASH, token for token"
    return [gate("b", title, figure, 1.0, "equal", detail, raw.named("chain.greedy.json"))]


def gate_c(raw: Raw) -> list[dict[str, Any]]:
    return [
        one for arm in ("tree16-check", "tree32-check", "tree64-check") for one in self_checked(raw, arm, "c")
    ]


def self_checked(raw: Raw, arm: str, prefix: str) -> list[dict[str, Any]]:
    check = {key: value for key, value in raw.described(arm)["self_check"].items() if key != "errors"}
    source = raw.named(f"{arm}.info.json")
    worst = max(raw.described(arm)["self_check"]["errors"])
    node = f"{arm}: largest error of a node's logits against a prefill of its path, share of their range"
    leak = f"{arm}: largest change of a path's logits when other branches change, share of their range"
    tolerance = check["tolerance"]
    return [
        gate(f"{prefix}-{arm}", node, worst, tolerance, "max", check, source),
        gate(f"{prefix}-{arm}-siblings", leak, check["max_sibling_change"], tolerance, "max", {}, source),
    ]


def gate_d(raw: Raw) -> list[dict[str, Any]]:
    return [parity(raw, arm, reference, "d") for arm in TREES for reference in ("ar", "dflash")]


def gate_d_float32(raw: Raw) -> list[dict[str, Any]]:
    """Whether a tree's logits are further from float32's than plain decoding's are."""
    rows = raw.load("float32-distances.json")
    errors = {kind: np.array([abs(gpu - cpu) for gpu, cpu in pairs]) for kind, pairs in rows.items()}
    detail = {
        kind: {
            "executions": len(values),
            "median": round(float(np.median(values)), 4),
            "90 %": round(float(np.quantile(values, 0.9)), 4),
            "99 %": round(float(np.quantile(values, 0.99)), 4),
            "largest": round(float(values.max()), 4),
        }
        for kind, values in errors.items()
    }
    tested = mannwhitneyu(errors["tree"], errors["decode"], alternative="greater")
    figure = round(float(tested.pvalue), 4)
    title = "tree32's distances of the two best tokens, further from float32's than plain decoding's: p"
    source = raw.named("float32-distances.json")
    return [gate("d-float32", title, figure, 0.001, "min", detail, source)]


def gate_e(raw: Raw) -> list[dict[str, Any]]:
    every = raw.load("cpu-steps.json")
    gates = []
    for dtype, rows in every.items():
        rows = [row for row in rows if row["same_root"]]
        differing = [row for row in rows if not row["equal"]]
        far = [row for row in differing if not row["near"]]
        detail = {
            "steps": len(rows),
            "differing": len(differing),
            "causes": dict(Counter(row["cause"] for row in differing)),
            "mean_accept_length": {
                side: sum(row[side] for row in rows) / len(rows) for side in ("gpu", "cpu")
            },
        }
        equal = 1 - len(differing) / len(rows)
        source = raw.named("cpu-steps.json")
        title = f"accept lengths equal to the CPU engine's in {dtype}, teacher-forced, step by step"
        gates.append(gate(f"e-{dtype}", title, equal, 0.97, "min", detail, source))
        title = f"steps that differ from the CPU engine's in {dtype} and are no near-ties"
        margins = {"margins": sorted(str(row["margin"]) for row in far)}
        gates.append(gate(f"e-{dtype}-rest", title, len(far), 0, "equal", margins, source))
    rows = max(every.values(), key=len)
    source = raw.named("cpu-steps.json")
    for what in ("tree", "walk"):
        share = sum(row[f"{what}_equal"] for row in rows) / len(rows)
        title = f"steps whose {what} the tree core makes again from the GPU's own numbers"
        gates.append(gate(f"e-{what}", title, share, 1.0, "equal", {"steps": len(rows)}, source))
    return gates


def gate_f(raw: Raw) -> list[dict[str, Any]]:
    gates = []
    for arm in ("tree32-spine", "tree64-spine"):
        described = raw.described(arm)
        title = f"{arm}: steps that accept less than their own chain"
        source = raw.named(f"{arm}.info.json")
        gates.append(
            gate(f"f-{arm}", title, described["below_spine"], 0, "equal", against_chain(raw, arm), source)
        )
    for arm in TREES:
        described = raw.described(arm)
        share = described["below_spine"] / max(1, described["requests"])
        title = f"{arm}, best-first: share of steps below their own chain (reported, no target)"
        source = raw.named(f"{arm}.info.json")
        gates.append(gate(f"f-{arm}", title, share, 1.0, "max", against_chain(raw, arm), source))
    return gates


def against_chain(raw: Raw, arm: str) -> dict[str, Any]:
    described = raw.described(arm)
    return {
        # The server's own count: it has the step that was in flight when a request ended, too.
        "steps_counted": described["requests"],
        "below_spine": described["below_spine"],
        "accept_length": accept_length(raw, arm),
        "chain_accept_length": chain_accept_length(raw, arm),
    }


def gate_g(raw: Raw) -> list[dict[str, Any]]:
    described, info = raw.described("tree32"), raw.read("tree32", "info")
    share = described["tree_kernel_requests"] / max(1, described["requests"])
    detail = {"requests": described["requests"], "overlap_off": info["disable_overlap_schedule"]}
    detail["cuda_graph_off"] = info["disable_cuda_graph"]
    title = "graphs and overlap on: share of steps whose tree the recurrent kernels rebuilt"
    return [gate("g", title, share, 1.0, "equal", detail, raw.named("tree32.info.json"))]


def gate_j(raw: Raw) -> list[dict[str, Any]]:
    tree, unsafe = accept_length(raw, "tree32"), accept_length(raw, "unsafe32")
    share, detail = share_identical(raw, "unsafe32", "ar")
    wrong = [
        sum(a != b for a, b in zip(mine, theirs, strict=True)) / len(theirs)
        for mine, theirs in zip(raw.outputs("unsafe32"), raw.outputs("ar"), strict=True)
    ]
    detail |= {
        "accept_length": {"tree32": tree, "unsafe32": unsafe},
        "wrong_token_share": sum(wrong) / len(wrong),
    }
    title = "shared states: share of prompts whose text is still plain decoding's (reported, no target)"
    return [gate("j", title, share, 1.0, "max", detail, raw.named("unsafe32.greedy.json"))]


def gate_k(raw: Raw) -> list[dict[str, Any]]:
    share, detail = share_identical(raw, "tree32-tp2", "ar-tp2")
    detail["accept_length"] = accept_length(raw, "tree32-tp2")
    title = "two ranks: share of prompts identical to plain decoding on two ranks"
    return [gate("k", title, share, 0.7, "min", detail, raw.named("tree32-tp2.greedy.json"))]


def gate_wy(raw: Raw) -> list[dict[str, Any]]:
    """Replayed states beside stored ones, from a run of their own."""
    raw = Raw(raw.folder / "wy")
    gates = []
    for arm in ("chain", "tree16", "tree32", "tree64"):
        pair = (f"{arm}-wy", arm)
        for reference in ("ar", "dflash"):
            gates.append(parity(raw, pair[0], reference, "wy"))
            share, same = share_identical(raw, *pair)
            gates[-1]["detail"]["stored"] = same | {"identical_share": share}
            gates[-1]["detail"]["stored"]["accept_length"] = accept_length(raw, arm)
    for arm in ("tree16", "tree32", "tree64"):
        mine, stored = (raw.described(name)["state_scratch_bytes"] for name in (f"{arm}-wy", arm))
        title = f"{arm}-wy: bytes kept for the nodes, share of what stored states take"
        detail = {"replayed": mine, "stored": stored}
        source = raw.named(f"{arm}-wy.info.json")
        gates.append(gate(f"wy-{arm}-bytes", title, mine / stored, 1.0, "max", detail, source))
    gates += self_checked(raw, "tree64-wy-check", "wy")
    commit = raw.described("tree64-wy-check")["self_check"]["commit"]
    worst = max(commit["state_error"], commit["window_error"])
    title = "tree64-wy-check: error of a replayed commit's states and windows, share of what a path changes"
    source = raw.named("tree64-wy-check.info.json")
    gates.append(gate("wy-commit", title, worst, commit["tolerance"], "max", commit, source))
    for arm in ("tree16-wy", "tree16"):
        title = (
            f"{arm}: batches of 2, 3, 5, 8 in padded graphs, differences from batch 1 that are no near-ties"
        )
        sizes = [f"{arm} padded batch {size}" for size in (2, 3, 5, 8)]
        gates.append(no_near_ties(raw, sizes, f"wy-{arm}-padded", title))
    return gates


GATES: tuple[Callable[[Raw], list[dict[str, Any]]], ...] = (
    gate_a, gate_b, gate_c, gate_d, gate_d_float32, gate_e, gate_f, gate_g, gate_j, gate_k, gate_wy,
)  # fmt: skip
