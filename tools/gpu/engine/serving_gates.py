"""The gates of what is served: caches, load, sampling, features, checkpoints of other kinds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import chi2, chi2_contingency

from engine import checkpoints, penalties
from engine.answers import Missing, Raw, gate, no_near_ties, parity
from engine.judgement import FEATURES

# Of the workload `grammar`.
REGEX = "(yes|no|perhaps) [0-9]{3}"


def gate_h(raw: Raw) -> list[dict[str, Any]]:
    """Prefix caches, batches and aborts, with replayed states and with stored ones."""
    gates = []
    for arm in ("tree32-cached-wy", "tree32-cached"):
        gates += cache_gates(raw, arm)
        sizes = [f"{arm} batch {size}" for size in (2, 4, 8)]
        title = f"{arm}: batches of 2, 4, 8, differences from batch 1 that are no near-ties"
        gates.append(no_near_ties(raw, sizes, f"h-{arm}-batches", title))
        aborts = raw.read(arm, "aborts")
        same = float(aborts["before"] == aborts["after"])
        title = f"{arm}: after aborts the same answer as before"
        source = raw.named(f"{arm}.aborts.json")
        detail = {"aborted": aborts["aborted"]}
        gates.append(gate(f"h-{arm}-aborts", title, same, 1.0, "equal", detail, source))
    return gates


def gate_h_load(raw: Raw) -> list[dict[str, Any]]:
    """The one long mixed load, on whichever arm had it: replayed states are preferred."""
    arms = [arm for arm in ("tree32-cached-wy", "tree32-cached") if raw.has(arm, "load")]
    if not arms:
        raise Missing("tree32-cached-wy.load.json")
    arm = arms[0]
    load = raw.read(arm, "load")
    stuck = [problem for problem in load["problems"] if isinstance(problem["problem"], str)]
    detail = {"requests": load["requests"], "slowest_seconds": load["slowest_seconds"]}
    source = raw.named(f"{arm}.load.json")
    text = f"{arm}, mixed load: greedy answers that differ from the same alone by more than a near-tie"
    ended = f"{arm}, mixed load: failed, stuck or short answers"
    seconds = f"{arm}, mixed load: how long it was kept up, seconds"
    return [
        no_near_ties(raw, [f"{arm} load"], "h-load-text", text),
        gate("h-load", ended, len(stuck), 0, "equal", detail, source),
        gate("h-load-seconds", seconds, load["seconds"], 600, "min", {}, source),
    ]


def gate_h_pages(raw: Raw) -> list[dict[str, Any]]:
    return [one for arm in ("tree32-pages-wy", "tree32-pages") for one in cache_gates(raw, arm)]


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
    """Samples of both ways of keeping states against plain decoding's."""
    reference = raw.read("ar", "draws")
    gates = []
    for arm in ("tree32-wy", "tree32"):
        rows, source = raw.read(arm, "draws"), raw.named(f"{arm}.draws.json")
        for place, name in ((0, "first"), (1, "second")):
            pairs = [(by_place(a, place), by_place(b, place)) for a, b in zip(rows, reference, strict=True)]
            detail = {"prompts": len(pairs), "draws": sum(sum(row.values()) for row in rows)}
            detail |= {"biased_sampler": same_distribution([(bias(a), b) for a, b in pairs])}
            title = f"{arm}, T=0.8: p of the {name} token's distribution against plain decoding's"
            figure = same_distribution(pairs)
            gates.append(gate(f"i-{arm}-{name}", title, figure, 0.001, "min", detail, source))
        biased = gates[-1]["detail"]["biased_sampler"]
        title = (
            f"{arm}: the same test on a sampler that takes its best token a quarter more often (must fail)"
        )
        gates.append(gate(f"i-{arm}-biased", title, biased, 0.001, "max", {}, source))
    return gates


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


def gate_features(raw: Raw) -> list[dict[str, Any]]:
    """Sampling parameters, grammars and refusals on a real server."""
    arm = "tree32-grammar"
    source = raw.named(f"{arm}.features.json")
    title = f"{arm}: bias, stops, log-probabilities, min_p: first differences from ar that are no near-ties"
    gates = [no_near_ties(raw, [f"{arm} features {case}" for case in FEATURES], "features-text", title)]
    gates[0]["detail"]["answers_raw"] = source
    rows = raw.read(arm, "grammar")
    right = sum(re.fullmatch(REGEX, row["text"]) is not None for row in rows)
    title = f"{arm}: share of answers under a regular expression that match it"
    found = raw.named(f"{arm}.grammar.json")
    gates.append(
        gate("features-grammar", title, right / len(rows), 1.0, "equal", {"answers": len(rows)}, found)
    )
    refused = {name: raw.read(name, "refusals") for name in (arm, "shadow")}
    others = sum(row["status"] != 400 for rows in refused.values() for row in rows.values())
    title = "requests that a mode cannot serve and that were not answered 400"
    found = raw.named(f"{arm}.refusals.json")
    gates.append(
        gate(
            "features-refusals", title, others, 0, "equal", {"asked": sum(map(len, refused.values()))}, found
        )
    )
    kinds = raw.read(arm, "kinds")
    wrong = {f"{kind}, {how}": said for how, rows in kinds.items() for kind, said in rows.items() if said}
    title = f"{arm}: kinds of request that went wrong, alone or all at once"
    found = raw.named(f"{arm}.kinds.json")
    gates.append(
        gate(
            "features-kinds",
            title,
            len(wrong),
            0,
            "equal",
            {"wrong": wrong, "kinds": list(kinds["alone"])},
            found,
        )
    )
    return gates


def gate_penalties(raw: Raw) -> list[dict[str, Any]]:
    """Penalised answers, token by token; plain decoding's are told beside them."""
    arm = "tree32-grammar"
    answers = {name: raw.read(name, "features").get("penalties") for name in (arm, "ar")}
    if not all(answers.values()):
        raise Missing("penalties in the features of tree32-grammar and ar")
    told = {name: penalties.summary(rows, raw.noise()) for name, rows in answers.items()}
    title = f"{arm}: tokens of penalised answers that are not what the penalties choose, near-ties apart"
    detail = told[arm] | {"ar": told["ar"]}
    source = raw.named(f"{arm}.features.json")
    return [gate("penalties", title, told[arm][penalties.WRONG], 0, "equal", detail, source)]


def gate_checkpoints(raw: Raw) -> list[dict[str, Any]]:
    """The 27B's class, a tower, a drafter with a short window, long texts."""
    gates = [
        parity(raw, arm, "ar", "checkpoints")
        for arm in ("tree32-text", "tree32-vision", "tree32-vision-wy", "tree32-window", "dflash-window")
    ]
    for workload, reference, arms in (
        ("images", "ar-vision", ("tree32-vision", "tree32-vision-wy")),
        ("long", "ar-long", ("tree32-long", "dflash-long")),
    ):
        for arm in arms:
            answers = checkpoints.against(raw.read(arm, workload), raw.read(reference, workload))
            far = [gap for gap in answers["gaps"] if gap is None or gap > 2 * raw.noise()]
            title = f"{arm}: {workload}, refused or different from {reference} by more than a near-tie"
            figure = len(far) + len(answers["refused"])
            source = raw.named(f"{arm}.{workload}.json")
            gates.append(gate(f"checkpoints-{arm}-{workload}", title, figure, 0, "equal", answers, source))
    return gates


def gate_fp8(raw: Raw) -> list[dict[str, Any]]:
    """Weights in FP8, against plain decoding of the same weights."""
    return [
        parity(raw, arm, "ar-fp8", "fp8", "ar-fp8")
        for arm in ("tree32-fp8-wy", "tree32-fp8", "tree32-fp8-drafter")
    ]


def gate_kv8(raw: Raw) -> list[dict[str, Any]]:
    """KV caches in FP8, against plain decoding with the same caches."""
    return [parity(raw, "tree32-kv8", "ar-kv8", "kv8", "ar-kv8")]


SERVING_GATES: tuple[Callable[[Raw], list[dict[str, Any]]], ...] = (
    gate_h, gate_h_load, gate_h_pages, gate_i, gate_features, gate_penalties,
    gate_checkpoints, gate_fp8, gate_kv8,
)  # fmt: skip
