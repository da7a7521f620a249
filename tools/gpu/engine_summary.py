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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine import ties
from scipy.stats import chi2, chi2_contingency, mannwhitneyu

SCHEMA = 1
TREES = ("tree8", "tree16", "tree32", "tree64")


class Missing(Exception):
    """A gate's arms did not run."""


class Raw:
    """The unpacked answers, by arm and workload."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        """A file by its name without the compression's suffix."""
        for file in (self.folder / f"{name}.xz", self.folder / name):
            if file.is_file():
                return file
        raise Missing(name)

    def named(self, name: str) -> str:
        """A file's path inside the results folder."""
        file = self.file(name)
        top = next(parent for parent in file.parents if parent.name == "raw")
        return str(file.relative_to(top.parent))

    def load(self, name: str) -> Any:
        file = self.file(name)
        content = file.read_bytes()
        return json.loads(lzma.decompress(content) if file.suffix == ".xz" else content)

    def read(self, arm: str, workload: str) -> Any:
        return self.load(f"{arm}.{workload}.json")

    def outputs(self, arm: str) -> list[list[int]]:
        return [row["output_ids"] for row in self.read(arm, "greedy")]

    def judgement(self, where: str) -> tuple[str, list[dict[str, Any]]]:
        """(file, first differences) of one comparison, from the last run that made it."""
        names = {file.name.removesuffix(".xz") for file in self.folder.glob("judge-*.differences.json*")}
        for name in sorted(names, reverse=True):
            run = self.load(name)
            if where in run["compared"]:
                return name, [question for question in run["questions"] if question["where"] == where]
        raise Missing(f"comparison {where!r}")

    def differences(self, where: str) -> list[dict[str, Any]]:
        return self.judgement(where)[1]

    def noise(self) -> float:
        measured = ties.noise(self.read("ar", "ties"))
        if measured is None:
            raise Missing("a prefix in ar.ties")
        return measured

    def described(self, arm: str) -> dict[str, Any]:
        described = self.read(arm, "info").get("ddtree")
        if not described:
            raise Missing(f"{arm}.info has no ddtree")
        return dict(described)


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
    for make in GATES:
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


def chain_accept_length(raw: Raw, arm: str) -> float:
    """What the top-1 chain alone would have accepted in the same steps."""
    matched, steps = 0, 0
    for row in raw.read(arm, "greedy"):
        for drafts, count in enumerate(row["meta"]["spec_cap_lens_histogram"]):
            matched, steps = matched + drafts * count, steps + count
    return 1 + matched / steps


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


def parity(raw: Raw, arm: str, reference: str, prefix: str) -> dict[str, Any]:
    """First differences of one arm from a reference that are no near-ties."""
    share, detail = share_identical(raw, arm, reference)
    detail["accept_length"] = accept_length(raw, arm)
    title = f"{arm}: first differences from {reference} that are no near-ties"
    found = no_near_ties(raw, [f"{arm} against {reference}"], f"{prefix}-{arm}-{reference}", title)
    found["detail"] |= {"identical_share": share} | detail
    return found


def no_near_ties(raw: Raw, comparisons: list[str], id_: str, title: str) -> dict[str, Any]:
    """A gate on first differences; every one of them is in its raw file, with the reference's best tokens."""
    noise = raw.noise()
    judged = [raw.judgement(where) for where in comparisons]
    asked = [question for _, questions in judged for question in questions]
    far = [question for question in asked if not ties.is_near(question, noise)]
    gaps = Counter(str(ties.gap(question["best"], question["tokens"])) for question in asked)
    detail = {
        "divergences": len(asked),
        "gaps": dict(sorted(gaps.items())),
        "tie_noise": noise,
        "tie_noise_raw": raw.named("ar.ties.json"),
    }
    return gate(id_, title, len(far), 0, "equal", detail, raw.named(judged[0][0]))


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


def gate_h_cached(raw: Raw) -> list[dict[str, Any]]:
    gates = cache_gates(raw, "tree32-cached")
    sizes = [f"tree32-cached batch {size}" for size in (2, 4, 8)]
    title = "batches of 2, 4, 8: differences from batch 1 that are no near-ties"
    gates.append(no_near_ties(raw, sizes, "h-batches", title))
    title = "greedy answers under mixed load that differ from the same alone by more than a near-tie"
    gates.append(no_near_ties(raw, ["tree32-cached load"], "h-load-text", title))
    aborts = raw.read("tree32-cached", "aborts")
    same = float(aborts["before"] == aborts["after"])
    title = "after aborts the same answer as before"
    source = raw.named("tree32-cached.aborts.json")
    gates.append(gate("h-aborts", title, same, 1.0, "equal", {"aborted": aborts["aborted"]}, source))
    load = raw.read("tree32-cached", "load")
    stuck = [problem for problem in load["problems"] if isinstance(problem["problem"], str)]
    detail = {"requests": load["requests"], "slowest_seconds": load["slowest_seconds"]}
    source = raw.named("tree32-cached.load.json")
    title = "mixed load: failed, stuck or short answers"
    gates.append(gate("h-load", title, len(stuck), 0, "equal", detail, source))
    title = "mixed load: how long it was kept up, seconds"
    gates.append(gate("h-load-seconds", title, load["seconds"], 600, "min", {}, source))
    return gates


def gate_h_pages(raw: Raw) -> list[dict[str, Any]]:
    return cache_gates(raw, "tree32-pages")


def cache_gates(raw: Raw, arm: str) -> list[dict[str, Any]]:
    gates = []
    for workload in ("cache", "lengths"):
        rows = raw.read(arm, workload)
        title = f"{arm} {workload}: warm answers that differ from cold ones by more than a near-tie"
        found = no_near_ties(raw, [f"{arm} {workload}"], f"h-{arm}-{workload}", title)
        hits = sum(bool(row.get("cached_tokens")) for row in rows)
        found["detail"] |= {"requests": len(rows), "with_hits": hits}
        found["detail"]["answers_raw"] = raw.named(f"{arm}.{workload}.json")
        gates.append(found)
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
        gates.append(gate(f"i-{name}", title, figure, 0.001, "min", detail, raw.named("tree32.draws.json")))
    biased = gates[-1]["detail"]["biased_sampler"]
    title = "the same test on a sampler that takes its best token a quarter more often (must fail)"
    return [*gates, gate("i-biased", title, biased, 0.001, "max", {}, raw.named("tree32.draws.json"))]


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
    gate_a, gate_b, gate_c, gate_d, gate_d_float32, gate_e, gate_f, gate_g, gate_h_cached, gate_h_pages,
    gate_i, gate_j, gate_k, gate_wy,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
