"""One server of several widths: each forced by requests, all mixed in one batch, and picked by the policy."""

from __future__ import annotations

import concurrent.futures
import json
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

from engine.host import Context
from engine.servers import Server

# Budget -> the arm whose only width it is.
ALONE = {15: "tree16", 31: "tree32", 63: "tree64"}
SIZES = (1, 2, 4, 8)
# Prompts of a mixed batch and of a timing.
MIXED, TIMED, TIMED_TOKENS = 12, 8, 96


def asked(budget: int | str | None) -> dict[str, Any]:
    """Sampling parameters that ask for a budget."""
    return {} if budget is None else {"custom_params": {"ddtree_budget": budget}}


def widths(context: Context, server: Server) -> Any:
    """Every prompt alone at every budget, then budgets mixed in flight, refusals, and seconds a step.

    The table of seconds is written as the policy reads it, for the arm `tree64-auto`.
    """
    alone: dict[str, Any] = {str(budget): [] for budget in ALONE}
    for number, ids in enumerate(context.prompts):
        # Interleaved, so that a step of one width follows one of another.
        for budget in ALONE:
            began = time.monotonic()
            answer = server.generate(ids, context.options.tokens, sampling=asked(budget))
            row = {"prompt": number, "output_ids": answer["output_ids"], "seconds": time.monotonic() - began}
            row["meta"] = {
                key: value for key, value in answer["meta_info"].items() if key.startswith("spec_")
            }
            alone[str(budget)].append(row)
    found = {"alone": alone, "mixed": mixed(context, server), "refused": refused(context, server)}
    found["seconds"] = {str(budget + 1): step_seconds(context, server, budget) for budget in ALONE}
    table = {"schema": 1, "kind": "ddtree-step-costs", "seconds": found["seconds"]}
    (context.raw / f"{server.name}.costs.json").write_text(json.dumps(table))
    return found


def mixed(context: Context, server: Server) -> list[dict[str, Any]]:
    """Prompts with budgets in turn, eight in flight: a batch runs at the largest that is in it."""
    budgets = [*ALONE, None]
    jobs = [(number, budgets[number % len(budgets)]) for number in range(min(MIXED, len(context.prompts)))]

    def ask(job: tuple[int, int | None]) -> dict[str, Any]:
        number, budget = job
        answer = server.generate(context.prompts[number], context.options.tokens, sampling=asked(budget))
        return {"prompt": number, "budget": budget, "output_ids": answer["output_ids"]}

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, jobs))


def refused(context: Context, server: Server) -> dict[str, Any]:
    """Budgets that were not captured have to be answered 400, with those that were."""
    rows = {}
    for budget in (7, 32, "auto"):
        body = {"input_ids": context.prompts[0], "sampling_params": {"max_new_tokens": 4, **asked(budget)}}
        try:
            rows[str(budget)] = {"status": 200, "body": server.post("/generate", body)}
        except urllib.error.HTTPError as error:
            rows[str(budget)] = {"status": error.code, "body": error.read().decode()[:600]}
    return rows


def step_seconds(context: Context, server: Server, budget: int) -> dict[str, float]:
    """Seconds of a step by batch size, prefill included: {batch size: seconds}."""
    return {str(size): timed(context, server, budget, size)["seconds_a_step"] for size in SIZES}


def timed(context: Context, server: Server, budget: int | str | None, size: int) -> dict[str, float]:
    """Some prompts, always `size` in flight."""
    prompts = (context.prompts * TIMED)[: max(size, TIMED)]

    def ask(ids: list[int]) -> tuple[int, int]:
        answer = server.generate(ids, TIMED_TOKENS, sampling=asked(budget))
        return len(answer["output_ids"]), int(answer["meta_info"]["spec_verify_ct"])

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(ask, prompts))
    seconds = time.monotonic() - began
    tokens, request_steps = (sum(column) for column in zip(*answers, strict=True))
    return {"tokens_a_second": tokens / seconds, "seconds_a_step": seconds * size / request_steps}


def auto(context: Context, server: Server) -> Any:
    """Tokens a second of the policy beside every fixed budget in the same server, in turns."""
    ways: tuple[int | str, ...] = ("auto", *ALONE)
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        timed(context, server, "auto", size)  # what it has to see before it chooses
        for turn in range(3):
            rows += [
                {"size": size, "turn": turn, "budget": way, **timed(context, server, way, size)}
                for way in ways
            ]
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    return {"rows": rows, "ddtree": state.get("ddtree"), "best_fixed": against_fixed(rows)}


def against_fixed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By batch size: tokens a second of the policy over those of the best fixed budget, means over turns."""
    ratios = {}
    for size in sorted({row["size"] for row in rows}):
        rates: dict[Any, list[float]] = {}
        for row in rows:
            if row["size"] == size:
                rates.setdefault(row["budget"], []).append(row["tokens_a_second"])
        means = {way: sum(found) / len(found) for way, found in rates.items()}
        ratios[str(size)] = means.pop("auto") / max(means.values())
    return ratios


def comparisons(
    results: dict[str, Any], prompts: list[list[int]]
) -> Iterator[tuple[str, int, list[int], list[int], list[int]]]:
    """(where, number, prompt, one output, the other): a forced width and the arm that has only this one."""
    for arm, runs in results.items():
        found = runs.get("widths")
        if not found:
            continue
        for budget, single in single_arms(arm).items():
            theirs = results.get(single, {}).get("greedy", ())
            for mine, other in zip(found["alone"][str(budget)], theirs, strict=False):
                number = mine["prompt"]
                where = f"{arm} budget {budget} against {single}"
                yield where, number, prompts[number], mine["output_ids"], other["output_ids"]
        for row in found["mixed"]:
            number, budget = row["prompt"], row["budget"] or max(ALONE)
            alone = found["alone"][str(budget)][number]
            yield f"{arm} mixed", number, prompts[number], row["output_ids"], alone["output_ids"]


def single_arms(arm: str) -> dict[int, str]:
    """Budget -> the arm of one width that an arm of several is compared with."""
    suffix = "-wy" if arm.endswith("-wy") else ""
    return {budget: name + suffix for budget, name in ALONE.items()}


def figures(arm: str, results: dict[str, Any]) -> dict[str, Any]:
    """Of an arm of several widths: identical outputs and accept lengths, [forced, the single arm's]."""
    found = results[arm]["widths"]
    lines: dict[str, Any] = {}
    for budget, single in single_arms(arm).items():
        mine = found["alone"][str(budget)]
        theirs = results.get(single, {}).get("greedy")
        line: dict[str, Any] = {"accept_length": [_accept_length(mine)]}
        if theirs:
            pairs = zip(mine, theirs, strict=True)
            same = [one["output_ids"] == other["output_ids"] for one, other in pairs]
            line["identical"] = f"{sum(same)}/{len(same)}"
            line["accept_length"].append(_accept_length(theirs))
        lines[str(budget)] = line
    lines["refused"] = [row["status"] for row in found["refused"].values()]
    lines["seconds"] = found["seconds"]
    return lines


def _accept_length(rows: list[dict[str, Any]]) -> float | None:
    steps = sum(row["meta"].get("spec_verify_ct", 0) for row in rows)
    return sum(len(row["output_ids"]) for row in rows) / steps if steps else None
