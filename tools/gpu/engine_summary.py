#!/usr/bin/env python3
"""Make the gates of results/h200-engine/summary.json from the archives that engine_plan.py brought back.

    .venv/bin/python tools/gpu/engine_summary.py results/h200-engine ARCHIVE.tar.xz [ARCHIVE.tar.xz ...]

Unpacks every archive into the folder's `raw/` (a later archive replaces an arm's earlier answers) and
computes each figure from those files, so that anybody can: with no archive given, from `raw/` as it is.
Gates whose arms did not run are left out and named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import chi2, chi2_contingency

SCHEMA = 1
TREES = ("tree8", "tree16", "tree32", "tree64")


class Missing(Exception):
    """A gate's arms did not run."""


class Raw:
    """The unpacked answers, by arm and workload."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, arm: str, workload: str) -> Any:
        file = self.folder / f"{arm}.{workload}.json"
        if not file.is_file():
            raise Missing(f"{arm}.{workload}")
        return json.loads(file.read_text())

    def outputs(self, arm: str) -> list[list[int]]:
        return [row["output_ids"] for row in self.read(arm, "greedy")]

    def differences(self, where: str) -> list[dict[str, Any]]:
        """Differences of one comparison, from the last run that made it."""
        for file in sorted(self.folder.glob("judge-*.differences.json"), reverse=True):
            run = json.loads(file.read_text())
            if where in run["compared"]:
                return [question for question in run["questions"] if question["where"] == where]
        raise Missing(f"comparison {where!r}")

    def described(self, arm: str) -> dict[str, Any]:
        described = self.read(arm, "info").get("ddtree")
        if not described:
            raise Missing(f"{arm}.info has no ddtree")
        return dict(described)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results folder; raw files go to its raw/")
    parser.add_argument("archives", type=Path, nargs="*", help="engine.tar.xz files, oldest first")
    options = parser.parse_args()
    raw = options.folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for archive in options.archives:
        with tarfile.open(archive) as tar:
            tar.extractall(raw, filter="data")
    summary, missing = summarise(Raw(raw))
    (options.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for gate in summary["gates"]:
        wanted = f"{gate['direction']} {gate['target']}"
        print(f"{gate['id']:>3}  {verdict(gate)}  {gate['figure']} ({wanted})  {gate['title']}")
    for gate, what in missing.items():
        print(f"{gate:>3}  not run: {what}", file=sys.stderr)
    return 0 if all(verdict(gate) == "ok  " for gate in summary["gates"]) else 1


def summarise(raw: Raw) -> tuple[dict[str, Any], dict[str, str]]:
    """(summary, {gate id: what it lacks})."""
    facts = raw.read("host", "facts")
    gates: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for make in GATES:
        try:
            gates += make(raw)
        except Missing as lacking:
            missing[make.__name__.removeprefix("gate_")] = str(lacking)
    served = sorted(raw.folder.glob("*.greedy.json"))
    return {
        "schema": SCHEMA,
        "hardware": {"cards": facts.get("cards"), "nvidia_smi": facts.get("nvidia_smi")},
        "versions": facts.get("versions", {}) | {"python": facts.get("python"), "cuda": facts.get("cuda")},
        "prompts_sha256": facts.get("prompts_sha256"),
        "arms": [file.name.split(".")[0] for file in served],
        "gates": gates,
    }, missing


def gate(
    id_: str, title: str, figure: float, target: float, direction: str, detail: Any, raw: str
) -> dict[str, Any]:
    return {
        "id": id_,
        "title": title,
        "figure": figure,
        "target": target,
        "direction": direction,
        "detail": detail,
        "raw": raw,
    }


def verdict(item: dict[str, Any]) -> str:
    figure, target = item["figure"], item["target"]
    holds = {"min": figure >= target, "max": figure <= target, "equal": figure == target}[item["direction"]]
    return "ok  " if holds else "FAIL"


def share_identical(raw: Raw, arm: str, reference: str) -> tuple[float, dict[str, Any]]:
    mine, theirs = raw.outputs(arm), raw.outputs(reference)
    same = [one == other for one, other in zip(mine, theirs, strict=True)]
    return sum(same) / len(same), {"identical": sum(same), "prompts": len(same), "reference": reference}


def accept_length(raw: Raw, arm: str) -> float:
    rows = raw.read(arm, "greedy")
    steps = sum(row["meta"]["spec_verify_ct"] for row in rows)
    return sum(len(row["output_ids"]) for row in rows) / steps


def gate_a(raw: Raw) -> list[dict[str, Any]]:
    figure, detail = share_identical(raw, "shadow", "dflash")
    detail["shadow"] = {
        key: raw.described("shadow").get(key) for key in ("shadow_steps", "shadow_accept_length")
    }
    return [
        gate(
            "a",
            "shadow's text is DFLASH's, token for token",
            figure,
            1.0,
            "equal",
            detail,
            "raw/shadow.greedy.json",
        )
    ]


def gate_b(raw: Raw) -> list[dict[str, Any]]:
    figure, detail = share_identical(raw, "chain", "dflash")
    detail["accept_length"] = {arm: accept_length(raw, arm) for arm in ("chain", "dflash")}
    title = "one candidate a position at the block's width is DFLASH, token for token"
    return [gate("b", title, figure, 1.0, "equal", detail, "raw/chain.greedy.json")]


def gate_c(raw: Raw) -> list[dict[str, Any]]:
    checks = {
        arm: raw.described(arm)["self_check"] for arm in ("tree16-check", "tree32-check", "tree64-check")
    }
    worst = max(check["max_relative_error"] for check in checks.values())
    leak = max(check["max_sibling_change"] for check in checks.values())
    tolerance = min(check["tolerance"] for check in checks.values())
    detail = {arm: {k: v for k, v in check.items() if k != "errors"} for arm, check in checks.items()}
    source = "raw/tree64-check.info.json"
    return [
        gate(
            "c",
            "largest error of a node against its path, share of the logits' range",
            worst,
            tolerance,
            "max",
            detail,
            source,
        ),
        gate(
            "c-siblings",
            "largest change when another branch changes, share of the range",
            leak,
            tolerance,
            "max",
            {},
            source,
        ),
    ]


def gate_d(raw: Raw) -> list[dict[str, Any]]:
    noise = tie_noise(raw)
    gates = []
    for arm in TREES:
        for reference in ("ar", "dflash"):
            share, detail = share_identical(raw, arm, reference)
            mine = raw.differences(f"{arm} against {reference}")
            far = [q for q in mine if q["gap"] > 2 * noise]
            detail |= {"identical_share": share, "divergences": len(mine), "tie_noise": noise}
            detail |= {"gaps": [q["gap"] for q in mine], "accept_length": accept_length(raw, arm)}
            title = f"{arm}: first differences from {reference} that are no near-ties"
            gates.append(
                gate(f"d-{arm}-{reference}", title, len(far), 0, "equal", detail, f"raw/{arm}.greedy.json")
            )
    return gates


def tie_noise(raw: Raw) -> float:
    """Largest change of a best token's log-probability between valid executions of one prefix."""
    changes = [0.0]
    for row in raw.read("ar", "ties"):
        variants = [
            {entry[1]: entry[0] for entry in one} for one in (row["decode"], row["prefill"], *row["batched"])
        ]
        for token in set.intersection(*(set(variant) for variant in variants)):
            values = [variant[token] for variant in variants]
            changes.append(max(values) - min(values))
    return max(changes)


def gate_e(raw: Raw) -> list[dict[str, Any]]:
    file = raw.folder / "cpu-steps.json"
    if not file.is_file():
        raise Missing("cpu-steps.json (tools/gpu/compare_steps.py)")
    rows = [row for row in json.loads(file.read_text()) if row["same_root"]]
    differing = [row for row in rows if not row["equal"]]
    detail = {"steps": len(rows), "differing": len(differing), "near": sum(row["near"] for row in differing)}
    equal = 1 - len(differing) / len(rows)
    far = sum(not row["near"] for row in differing)
    source = "raw/cpu-steps.json"
    return [
        gate(
            "e",
            "accept lengths equal to the CPU engine's, teacher-forced",
            equal,
            0.97,
            "min",
            detail,
            source,
        ),
        gate("e-rest", "differing steps that are no near-ties", far, 0, "equal", detail, source),
    ]


def gate_f(raw: Raw) -> list[dict[str, Any]]:
    gates = []
    for arm in ("tree32-spine", "tree64-spine"):
        described = raw.described(arm)
        detail = {key: described.get(key) for key in ("requests", "accept_length", "spine_accept_length")}
        title = f"{arm}: steps that accept less than their own chain"
        gates.append(
            gate(f"f-{arm}", title, described["below_spine"], 0, "equal", detail, f"raw/{arm}.info.json")
        )
    best_first = raw.described("tree32")
    share = best_first["below_spine"] / max(1, best_first["requests"])
    detail = {key: best_first.get(key) for key in ("requests", "accept_length", "spine_accept_length")}
    title = "best-first, 32 nodes: share of steps below their chain (reported, no target)"
    return [*gates, gate("f-best-first", title, share, 1.0, "max", detail, "raw/tree32.info.json")]


def gate_g(raw: Raw) -> list[dict[str, Any]]:
    described, info = raw.described("tree32"), raw.read("tree32", "info")
    share = described["tree_kernel_requests"] / max(1, described["requests"])
    detail = {"requests": described["requests"], "overlap_off": info["disable_overlap_schedule"]}
    detail["cuda_graph_off"] = info["disable_cuda_graph"]
    title = "graphs and overlap on: share of steps whose tree the recurrent kernels rebuilt"
    return [gate("g", title, share, 1.0, "equal", detail, "raw/tree32.info.json")]


def gate_h(raw: Raw) -> list[dict[str, Any]]:
    noise = tie_noise(raw)
    gates = []
    for arm in ("tree32-cached", "tree32-pages"):
        for workload in ("cache", "lengths"):
            rows = raw.read(arm, workload)
            far = [q for q in raw.differences(f"{arm} {workload}") if q["gap"] > 2 * noise]
            hits = sum(bool(row.get("cached_tokens")) for row in rows)
            detail = {"requests": len(rows), "with_hits": hits, "tie_noise": noise}
            title = f"{arm} {workload}: warm answers that differ from cold ones by more than a near-tie"
            gates.append(
                gate(f"h-{arm}-{workload}", title, len(far), 0, "equal", detail, f"raw/{arm}.{workload}.json")
            )
    far = [
        q
        for size in (2, 4, 8)
        for q in raw.differences(f"tree32-cached batch {size}")
        if q["gap"] > 2 * noise
    ]
    title = "batches of 2, 4, 8: differences from batch 1 that are no near-ties"
    gates.append(
        gate("h-batches", title, len(far), 0, "equal", {"tie_noise": noise}, "raw/tree32-cached.batches.json")
    )
    far = [q for q in raw.differences("tree32-cached load") if q["gap"] > 2 * noise]
    title = "greedy answers under mixed load that differ from the same alone by more than a near-tie"
    source = "raw/tree32-cached.load.json"
    gates.append(gate("h-load-text", title, len(far), 0, "equal", {"tie_noise": noise}, source))
    aborts = raw.read("tree32-cached", "aborts")
    same = float(aborts["before"] == aborts["after"])
    gates.append(
        gate(
            "h-aborts",
            "after aborts the same answer as before",
            same,
            1.0,
            "equal",
            {"aborted": aborts["aborted"]},
            "raw/tree32-cached.aborts.json",
        )
    )
    load = raw.read("tree32-cached", "load")
    stuck = [problem for problem in load["problems"] if isinstance(problem["problem"], str)]
    detail = {
        "seconds": load["seconds"],
        "requests": load["requests"],
        "slowest_seconds": load["slowest_seconds"],
    }
    gates.append(
        gate(
            "h-load",
            "mixed load: failed, stuck or short answers",
            len(stuck),
            0,
            "equal",
            detail,
            "raw/tree32-cached.load.json",
        )
    )
    return gates


def gate_i(raw: Raw) -> list[dict[str, Any]]:
    reference, rows = raw.read("ar", "draws"), raw.read("tree32", "draws")
    gates = []
    for place, name in ((0, "first"), (1, "second")):
        pairs = [(by_place(a, place), by_place(b, place)) for a, b in zip(rows, reference, strict=True)]
        detail = {"prompts": len(pairs), "draws": sum(sum(row.values()) for row in rows)}
        detail |= {"biased_sampler": same_distribution([(bias(a), b) for a, b in pairs])}
        title = f"T=0.8: p of the {name} token's distribution against plain decoding's"
        figure = same_distribution(pairs)
        gates.append(gate(f"i-{name}", title, figure, 0.001, "min", detail, "raw/tree32.draws.json"))
    biased = gates[-1]["detail"]["biased_sampler"]
    title = "the same test on a sampler that takes its best token a quarter more often (must fail)"
    return [*gates, gate("i-biased", title, biased, 0.001, "max", {}, "raw/tree32.draws.json")]


def by_place(counts: dict[str, int], place: int) -> Counter[str]:
    """Counts of the token at one place, given all the tokens before it where that is the first place's."""
    folded: Counter[str] = Counter()
    for tokens, count in counts.items():
        folded[",".join(tokens.split(",")[: place + 1])] += count
    return folded


def bias(counts: Counter[str]) -> Counter[str]:
    """What a sampler would have drawn that takes its best token a quarter more often."""
    (best, count), *_ = counts.most_common(1)
    moved = Counter(counts)
    moved[best] = int(count * 1.25)
    return moved


def same_distribution(pairs: list[tuple[Counter[str], Counter[str]]]) -> float:
    """p of one chi-square test over all pairs of samples; rare outcomes are pooled within a pair."""
    statistic, freedom = 0.0, 0
    for one, other in pairs:
        names = sorted(set(one) | set(other))
        table = np.array([[one[name] for name in names], [other[name] for name in names]])
        common = table.sum(0) >= 10
        pooled = np.concatenate([table[:, common], table[:, ~common].sum(1, keepdims=True)], axis=1)
        pooled = pooled[:, pooled.sum(0) > 0]
        if pooled.shape[1] > 1:
            tested = chi2_contingency(pooled, correction=False)
            statistic, freedom = statistic + tested.statistic, freedom + tested.dof
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


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
    return [gate("j", title, share, 1.0, "max", detail, "raw/unsafe32.greedy.json")]


def gate_k(raw: Raw) -> list[dict[str, Any]]:
    share, detail = share_identical(raw, "tree32-tp2", "ar-tp2")
    detail["accept_length"] = accept_length(raw, "tree32-tp2")
    title = "two ranks: share of prompts identical to plain decoding on two ranks"
    return [gate("k", title, share, 0.7, "min", detail, "raw/tree32-tp2.greedy.json")]


GATES: tuple[Callable[[Raw], list[dict[str, Any]]], ...] = (
    gate_a, gate_b, gate_c, gate_d, gate_e, gate_f, gate_g, gate_h, gate_i, gate_j, gate_k
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
