"""How the parts of a headline run are asked: every way in turns, and what is kept of the answers."""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bed_plan import LONGEST, SHORT, Timed, timed

from engine import profiles
from engine.headline_arms import SERVED
from engine.headline_sections import LONG_ANSWER, Section
from engine.host import Context
from engine.parting import best_tokens, noise_rows, parting
from engine.servers import Server

# Budgets of trees that a prompt's long answers are held against each other at, and tokens of one look back.
LONG_BUDGET, LOOK_BACK = 31, 500
# A long answer may take this long, its server not being alone.
LONG_LIMIT = 300
# Of a traced answer: seconds of steps, since a profiler begins late and a pause between answers is no gap.
TRACED_TOKENS = 600
# Nanoseconds: shorter gaps on the card are those between the kernels of one graph.
GAP = 20_000

# Seconds left below which a section ends.
Floor = float


@dataclass(frozen=True)
class Way:
    """One way of getting tokens: `server` and the sampling parameters that ask it for that."""

    label: str
    server: Server
    sampling: dict[str, Any]


def ways_of(section: Section, beside: Server, trees: Server) -> list[Way]:
    """The arm beside as `linear`, its other budgets if it has several, and the trees' budgets."""
    own = SERVED[section.beside].budgets
    ways = [Way("linear", beside, _budget(own[0]) if own else {})]
    ways += [Way(f"{section.beside}-{budget}", beside, _budget(budget)) for budget in own[1:]]
    for label in _served(section.ways, trees):
        ways.append(Way(label, trees, _budget(label if label == "auto" else int(label))))
    if not section.temperature:
        return ways
    warm = {"temperature": section.temperature}
    return [Way(way.label, way.server, way.sampling | warm) for way in ways]


def _served(labels: Sequence[str], trees: Server) -> list[str]:
    """Those that the server has widths for; a narrower one may have taken the place of the planned one."""
    widths = (trees.arm.config or {}).get("widths", [])
    return [label for label in labels if label == "auto" or int(label) + 1 in widths]


def _budget(budget: int | str) -> dict[str, Any]:
    return {"custom_params": {"ddtree_budget": budget}}


def steps(context: Context, section: Section, beside: Server, trees: Server, floor: Floor) -> None:
    """Milliseconds of a step with copies of a request, all ways in every round, order changing."""
    rng = random.Random(0)
    size, ways = section.size, ways_of(section, beside, trees)
    prompt = _long_prompt(context, section.length, 0) or [rng.randrange(4, 4096) for _ in range(200)]
    before = stages(trees)
    tokens = {way.label: _enough_tokens(way, prompt, section) for way in ways}
    rows: list[dict[str, float]] = []
    try:
        for number in range(section.count):
            if context.seconds_left() < floor:
                context.left_over.append(f"{section.name} from round {number}")
                break
            row = {}
            for way in rng.sample(ways, len(ways)):
                row[way.label] = timed_together(way, prompt, size, tokens[way.label]).ms
            rows.append(row)
        context.keep(section.beside, f"stages-{section.workload}", [before, stages(trees)])
    finally:
        context.keep(section.beside, section.workload, rows)


def _enough_tokens(way: Way, prompt: list[int], section: Section) -> int:
    warm = timed_together(way, prompt, section.size, section.steps)
    return min(LONGEST, max(section.steps, round(section.steps**2 / warm.steps)))


def timed_together(way: Way, prompt: list[int], size: int, tokens: int) -> Timed:
    """As `bed_plan.timed`, with copies of one request that end together."""
    if size == 1:
        return timed(way.server, prompt, tokens, sampling=way.sampling)
    (few, short), (many, long) = [_longest(way, prompt, size, count) for count in (SHORT, SHORT + tokens)]
    return Timed(1e3 * (long - short) / (many - few), many - few)


def _longest(way: Way, prompt: list[int], size: int, count: int) -> tuple[int, float]:
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        copies = [pool.submit(way.server.generate, prompt, count, sampling=way.sampling) for _ in range(size)]
        metas = [copy.result()["meta_info"] for copy in copies]
    taken = max(meta.get("spec_verify_ct") or count - 1 for meta in metas)
    return taken, max(meta["e2e_latency"] for meta in metas)


def texts(context: Context, section: Section, beside: Server, trees: Server, floor: Floor) -> None:
    """Groups of `size` prompts at once, every way on one group before the next, in an order that changes."""
    size, ways = section.size, ways_of(section, beside, trees)
    rng = random.Random(size)
    groups = _groups(context, section)
    if not groups:
        context.left_over.append(f"{section.name}: found {len(context.prompts)} prompts")
        return
    rows: list[dict[str, Any]] = []
    try:
        for way in ways:  # unmeasured: the first of a size may compile
            together(context, way, groups[0])
        for number, group in enumerate(groups):
            if context.seconds_left() < floor:
                context.left_over.append(f"{section.name} from group {number}")
                break
            for way in rng.sample(ways, len(ways)):
                rows.append({"group": number, "way": way.label, **together(context, way, group)})
    finally:
        context.keep(section.beside, section.workload, rows)


def _groups(context: Context, section: Section) -> list[list[list[int]]]:
    size = section.size
    if section.length:
        return [[_long_prompt(context, section.length, number)] for number in range(section.count)]
    most = min(len(context.prompts), section.count * size)
    return [context.prompts[i : i + size] for i in range(0, most - size + 1, size)]


def _long_prompt(context: Context, length: int, number: int) -> list[int]:
    """All prompts in a row, each time from another one on."""
    text = [token for ids in context.prompts[number:] + context.prompts[:number] for token in ids]
    return (text * (1 + length // len(text)))[:length]


def together(context: Context, way: Way, prompts: list[list[int]]) -> dict[str, Any]:
    """One request a prompt, all at once: the longest time, tokens, steps and texts."""

    def ask(ids: list[int]) -> Any:
        return way.server.generate(ids, context.options.tokens, sampling=way.sampling)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    return {
        "seconds": max(answer["meta_info"]["e2e_latency"] for answer in answers),
        "tokens": sum(len(answer["output_ids"]) for answer in answers),
        "steps": sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers),
        "output_ids": [answer["output_ids"] for answer in answers],
    }


def differences(context: Context, section: Section, beside: Server, trees: Server, floor: Floor) -> None:
    """Where greedy tokens first leave plain decoding's, and what the target says of the two tokens.

    All are kept as plain decoding's, whatever arm they were asked beside; the trees' server answers by a
    prefill, which is the target's own. Ways that were held against it already are not again.
    """
    mine = context.results.get(section.beside, {}).get("in-flight-1", [])
    plain = context.results.get("ar", {})
    if not mine or "in-flight-1" not in plain:
        context.left_over.append(f"{section.name}: nothing to hold it against")
        return
    if "noise" not in plain and section.beside == "ar":
        noise = list(noise_rows(context.prompts, beside, trees, lambda: context.seconds_left() >= floor))
        context.keep("ar", "noise", noise)
    rows = list(plain.get("differences", []))
    known = {row["way"] for row in rows}
    for row in _partings(context, section.beside, mine, trees, floor):
        if row["way"] not in known:
            rows.append(row)
    context.keep("ar", "differences", rows)


def _partings(
    context: Context, name: str, mine: list[dict[str, Any]], trees: Server, floor: Floor
) -> Iterator[dict[str, Any]]:
    truths = {
        row["group"]: row["output_ids"][0]
        for row in context.results["ar"]["in-flight-1"]
        if row["way"] == "linear"
    }
    asked: dict[tuple[int, int, int], Any] = {}
    for found in sorted(mine, key=lambda row: (row["group"], row["way"])):
        group, way = found["group"], name if found["way"] == "linear" else found["way"]
        truth = truths.get(group)
        if truth is None or way == "ar":
            continue
        tokens = found["output_ids"][0]
        place = parting(truth, tokens)
        row = {"group": group, "way": way, "place": place}
        if place is not None:
            key = group, place, tokens[place]
            if key not in asked:
                if context.seconds_left() < floor:
                    context.left_over.append(f"{name}.differences from prompt {group}")
                    return
                asked[key] = best_tokens(trees, context.prompts[group] + truth[:place])
            row |= {"tokens": [truth[place], tokens[place]], "best": asked[key]}
        yield row


def long(context: Context, section: Section, beside: Server, trees: Server, floor: Floor) -> None:
    """Thousands of tokens of both stores of states, each followed by prefills of its own text.

    The drift of a place is its token's log-probability in decoding less that in a prefill, whose state is
    fresh. Both decode at once: their time says nothing.
    """
    ways = {"wy": trees, "snapshot": beside}
    rows = []
    for number in range(section.count):
        if context.seconds_left() < floor:
            context.left_over.append(f"{section.name} from text {number}")
            break
        ids = context.prompts[number]
        with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
            jobs = {name: pool.submit(_long_answer, server, ids) for name, server in ways.items()}
            answers = {name: job.result() for name, job in jobs.items()}
        place = parting(*(answer["output_ids"] for answer in answers.values()))
        row = {"prompt": number, "answers": answers, "place": place}
        if place is not None:
            prefix = ids + answers["wy"]["output_ids"][:place]
            row["best"] = best_tokens(trees, prefix)
            row["tokens"] = [answer["output_ids"][place] for answer in answers.values()]
        rows.append(row)
    context.keep(section.beside, section.workload, rows)


def _long_answer(server: Server, ids: list[int]) -> dict[str, Any]:
    answer = server.generate(
        ids, LONG_ANSWER, sampling=_budget(LONG_BUDGET), return_logprob=True, timeout=LONG_LIMIT
    )
    tokens = answer["output_ids"]
    decoded = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    fresh: list[float] = []
    for first in range(0, len(tokens), LOOK_BACK):
        text = ids + tokens[: first + LOOK_BACK]
        # Its own token is the first of which a prefill knows nothing: one place earlier.
        start = len(ids) + first - 1
        scored = server.generate(text, 1, return_logprob=True, logprob_start_len=start)["meta_info"]
        fresh += [entry[0] for entry in scored["input_token_logprobs"][1:]]
    return {
        "output_ids": tokens,
        "steps": answer["meta_info"].get("spec_verify_ct"),
        "decoded": [round(value, 5) for value in decoded],
        "fresh": [round(value, 5) for value in fresh],
    }


def traces(context: Context, section: Section, beside: Server, trees: Server, floor: Floor) -> None:
    """Kernels of some steps of every way, and the gaps between them, by SGLang's profiler."""
    found: dict[str, Any] = {}
    for way in ways_of(section, beside, trees):
        if context.seconds_left() < floor:
            context.left_over.append(f"{section.name} from {way.label}")
            break
        folder = context.site / "traces" / f"{section.name}-{way.label}"
        trace = profiles.take(way.server, folder, [context.prompts[0]], way.sampling, tokens=TRACED_TOKENS)
        found[way.label] = in_short(trace)
    context.keep(section.beside, section.workload, found)


def in_short(trace: dict[str, Any]) -> dict[str, Any]:
    """Nanoseconds of a trace: from its first event to its last, busy, every gap of `GAP` or more, kernels."""
    events = trace["events"]
    kernels: dict[str, list[int]] = {}
    busy, end, gaps = 0, events[0][1], []
    for place, began, lasted in events:
        entry = kernels.setdefault(trace["names"][place], [0, 0])
        entry[0] += 1
        entry[1] += lasted
        if began - end >= GAP:
            gaps.append(began - end)
        busy += max(0, began + lasted - max(began, end))
        end = max(end, began + lasted)
    return {"span": end - events[0][1], "busy": busy, "gaps": gaps, "kernels": kernels}


def stages(trees: Server) -> dict[str, Any]:
    """Of every width so far: sampled steps and the mean seconds of their stages."""
    by_width = information(trees).get("ddtree", {}).get("by_width", {})
    wanted = ("sampled_steps", "stage_seconds")
    return {width: {key: found.get(key) for key in wanted} for width, found in by_width.items()}


def information(server: Server) -> dict[str, Any]:
    """What a server says of itself: the plugin's counters and where its memory went."""
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    wanted = ("ddtree", "memory_usage", "startup_time", "max_running_requests")
    return {key: state[key] for key in wanted if state.get(key) is not None}


ASKING = {"steps": steps, "texts": texts, "differences": differences, "long": long, "traces": traces}
