"""What can be said on the spot, without statistics: identical outputs, ties, counters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from engine import checkpoints, ties, widths
from engine.host import Context
from engine.parting import best_tokens, parting
from engine.servers import Server

# Best tokens asked for where executions part; a token that is not among them is no near-tie.
ASKED = 8
# Plain decoding, and the mark of arms of the same numbers: it stays up and answers about ties.
REFEREES = {"ar": "", "ar-tp2": "tp2", "ar-fp8": "fp8", "ar-kv8": "kv8"}
# Workloads whose answers are compared.
COMPARED = ("greedy", "cache", "lengths", "batches", "padded", "load", "widths", "features")
# Cases of `features` whose text should be plain decoding's: at T=0, or as near to it as makes no difference.
FEATURES = ("logit_bias", "stop", "stop_token_ids", "logprobs", "min_p, near zero temperature")
# Arms that others are compared with.
REFERENCES = (*REFEREES, "dflash")


def comparisons(context: Context) -> Iterator[tuple[str, int, list[int], list[int], list[int]]]:
    """(where, number, prompt, one output, the other) of all executions that should agree."""
    outputs = greedy_outputs(context)
    for reference in REFERENCES:
        for arm, rows in outputs.items():
            if reference not in outputs or not comparable(arm, reference):
                continue
            # An arm may have been asked fewer prompts.
            for number, (mine, theirs) in enumerate(zip(rows, outputs[reference], strict=False)):
                yield f"{arm} against {reference}", number, context.prompts[number], mine, theirs
    for arm, runs in context.results.items():
        for workload in ("cache", "lengths"):
            for number, row in enumerate(runs.get(workload, ())):
                yield f"{arm} {workload}", number, row["prefix"], row["warm"], row["cold"]
        for workload, named in (("batches", "batch"), ("padded", "padded batch")):
            sizes = runs.get(workload, {})
            for size, rows in sizes.items():
                for number, (mine, theirs) in enumerate(zip(rows, sizes["1"], strict=True)):
                    yield f"{arm} {named} {size}", number, context.prompts[number], mine, theirs
        loaded = runs.get("load")
        if loaded:
            # Named even when nothing differed.
            yield f"{arm} load", 0, [], [], []
        for problem in loaded["problems"] if loaded else ():
            if isinstance(problem["problem"], dict):
                number = problem["prompt"]
                mine, theirs = problem["problem"]["output_ids"], loaded["expected"][number]
                yield f"{arm} load", number, loaded["prefixes"][number], mine, theirs
    yield from features(context)
    yield from widths.comparisons(context.results, context.prompts)


def features(context: Context) -> Iterator[tuple[str, int, list[int], list[int], list[int]]]:
    """As `comparisons`, of the answers under sampling parameters."""
    theirs = context.results.get("ar", {}).get("features")
    for arm, runs in context.results.items():
        mine = runs.get("features")
        if arm == "ar" or not mine or not theirs:
            continue
        for case in FEATURES:
            for number, (one, other) in enumerate(zip(mine[case], theirs[case], strict=True)):
                where = f"{arm} features {case}"
                yield where, number, context.prompts[number], one["output_ids"], other["output_ids"]


def comparable(arm: str, reference: str) -> bool:
    """Whether two arms should agree: not with other numbers in weights or cache, or over two ranks."""
    if arm == reference:
        return False
    if reference == "ar-tp2":
        return True
    return all((mark in arm) == (mark in reference) for mark in ("tp2", "fp8", "kv8")) or (
        reference == "dflash" and "tp2" in arm
    )


def greedy_outputs(context: Context) -> dict[str, list[list[int]]]:
    return {
        arm: [row["output_ids"] for row in runs["greedy"]]
        for arm, runs in context.results.items()
        if "greedy" in runs
    }


def referee_of(where: str) -> str:
    """The arm of plain decoding that a comparison's arm shares its numbers with."""
    return next((name for name, mark in REFEREES.items() if mark and mark in where), "ar")


def ask_about_ties(context: Context, referees: dict[str, Server]) -> dict[str, Any]:
    """The referees' best tokens after every prefix at which two executions part.

    `compared` names every comparison that was made, also those without a difference.
    """
    compared: set[str] = set()
    questions = []
    for where, number, prompt, mine, theirs in comparisons(context):
        server = referees.get(referee_of(where))
        if server is None:
            context.left_over.append(f"ties of {where}")
            continue
        compared.add(where)
        place = parting(mine, theirs)
        if place is None:
            continue
        if context.seconds_left() < 20:
            context.left_over.append("tie questions")
            break
        best = best_tokens(server, prompt + mine[:place], ASKED)
        tokens = [mine[place], theirs[place]]
        found = {"where": where, "prompt": number, "place": place, "tokens": tokens, "best": best}
        questions.append(found | {"gap": ties.gap(best, tokens)})
    return {"compared": sorted(compared), "questions": questions}


def judge(context: Context) -> None:
    """Figures without statistics, printed and kept."""
    lines: dict[str, Any] = {}
    outputs = greedy_outputs(context)
    for arm, runs in context.results.items():
        line: dict[str, Any] = {}
        if "greedy" in runs:
            steps_taken = sum(row["meta"].get("spec_verify_ct", 0) for row in runs["greedy"])
            tokens = sum(len(row["output_ids"]) for row in runs["greedy"])
            line["accept_length"] = tokens / steps_taken if steps_taken else None
            for reference in ("ar", "dflash"):
                if reference in outputs and arm != reference:
                    same = [
                        mine == theirs for mine, theirs in zip(outputs[arm], outputs[reference], strict=False)
                    ]
                    line[f"identical_to_{reference}"] = f"{sum(same)}/{len(same)}"
        described = (runs.get("info") or {}).get("ddtree") or {}
        for key in (
            "requests",
            "tree_kernel_requests",
            "below_spine",
            "spine_accept_length",
            "shadow_accept_length",
        ):
            if key in described:
                line[key] = described[key]
        if described.get("self_check"):
            check = dict(described["self_check"])
            check.pop("errors", None)
            line["self_check"] = check
        if arm.endswith("-wy") and arm.removesuffix("-wy") in context.results:
            line["against_snapshots"] = against_snapshots(runs, context.results[arm.removesuffix("-wy")])
        for workload, reference in (("images", "ar-vision"), ("long", "ar-long")):
            answers = context.results.get(reference, {}).get(workload)
            if runs.get(workload) and answers:
                line[workload] = checkpoints.against(runs[workload], answers)
        if runs.get("widths"):
            line["widths"] = widths.figures(arm, context.results)
        if runs.get("auto"):
            line["auto_over_best_fixed"] = runs["auto"]["best_fixed"]
        if line:
            lines[arm] = line
    asked = context.results.get(context.judge, {}).get("differences", {}).get("questions", [])
    for referee in REFEREES:
        noise = ties.noise(context.results.get(referee, {}).get("ties", ()))
        if noise is None:
            continue
        mine = [question for question in asked if referee_of(question["where"]) == referee]
        lines[f"ties, {referee}"] = {
            "questions": len(mine),
            "noise": noise,
            "largest_gap": max((q["gap"] for q in mine if q["gap"] is not None), default=0),
            "not_near": Counter(q["where"] for q in mine if not ties.is_near(q, noise)),
        }
    context.keep(context.judge, "figures", lines)
    print(json.dumps(lines, indent=1), flush=True)


def against_snapshots(wy: dict[str, Any], snapshot: dict[str, Any]) -> dict[str, Any]:
    """The same arm with replayed and with stored states: {figure: [replayed, stored]}, and what is equal."""
    found: dict[str, Any] = {}
    sides = (wy, snapshot)
    if all("greedy" in runs for runs in sides):
        mine, theirs = (runs["greedy"] for runs in sides)
        same = [one["output_ids"] == other["output_ids"] for one, other in zip(mine, theirs, strict=False)]
        found["identical"] = f"{sum(same)}/{len(same)}"
        taken = [sum(row["meta"].get("spec_verify_ct", 0) for row in rows) for rows in (mine, theirs)]
        for name, totals in (
            ("accept_length", [sum(len(row["output_ids"]) for row in rows) for rows in (mine, theirs)]),
            ("seconds_a_step", [sum(row["seconds"] for row in rows) for rows in (mine, theirs)]),
        ):
            found[name] = [
                total / steps if steps else None for total, steps in zip(totals, taken, strict=True)
            ]
    described = [(runs.get("info") or {}).get("ddtree") or {} for runs in sides]
    found["state_scratch_bytes"] = [one.get("state_scratch_bytes") for one in described]
    return found
