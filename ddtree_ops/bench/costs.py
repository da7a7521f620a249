"""`ddtree bench costs`: seconds of a step at every budget and batch size of one server of several widths.

Copies of one prompt are sent at once and end together, once for few and once for many tokens. The difference
of both is decoding alone: prefill and the connection are in both. All points take turns; of each the median
is kept.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp

from ddtree_ops.bench.client import Answer, generate, new_session
from ddtree_ops.bench.dataset import Prompt, load_dataset
from ddtree_ops.errors import BadInput, Interrupted, JobFailed
from ddtree_ops.files import write_json
from ddtree_ops.output import Output
from ddtree_ops.services.discover import fetch_server_info

SHORT = 8
#: Fewer between a short and a long answer are mostly noise.
LEAST_STEPS = 4
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class CostsJob:
    """What to time.

    budgets  nodes without the root; null: those that the server says it has captured
    batches  requests in flight
    tokens   of a long answer
    rounds   measurements of every point
    """

    url: str
    budgets: Sequence[int] | None
    batches: Sequence[int]
    dataset: str
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Point:
    """A budget with so many requests in flight."""

    budget: int
    batch: int

    def __str__(self) -> str:
        return f"budget {self.budget}, {self.batch} in flight"


def run_costs(job: CostsJob, out: Path, sink: Output, *, dry_run: bool = False) -> dict[str, Any]:
    """Time every point, write the table to `out`, print it. Returns the table.

    Raises BadInput (budgets, dataset, folder), BadEnvironment (no server, no disk), JobFailed (a request
    failed or took another budget's steps).
    """
    prompt = load_dataset(job.dataset, 1).prompts[0]
    if not out.parent.is_dir():
        raise BadInput(f"--out: {out.parent} is no folder")
    info = fetch_server_info(job.url)
    points = [Point(*pair) for pair in product(_budgets(job, info), sorted(set(job.batches)))]
    if dry_run:
        requests = 2 * (job.rounds + 1) * sum(point.batch for point in points)
        sink.table("Points", ("budget", "in flight"), [(p.budget, p.batch) for p in points])
        sink.result(
            {"points": [vars(point) for point in points], "requests": requests},
            summary=f"{len(points)} points, {requests} requests; nothing was sent",
        )
        return {}
    try:
        seconds = asyncio.run(_measure(job, prompt, points, sink))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted("stopped; nothing was written") from None
    table = costs_table(seconds, about={"model_path": info.get("model_path"), "prompt": prompt.id})
    write_json(out, table)
    sink.table(
        "Milliseconds of a step, median [least, most]",
        ("budget", "in flight", "ms"),
        [
            (p.budget, p.batch, f"{1e3 * statistics.median(s):.2f} [{1e3 * min(s):.2f}, {1e3 * max(s):.2f}]")
            for p, s in seconds.items()
        ],
    )
    sink.result({"file": str(out), **table}, summary=f"step costs: {out}")
    return table


def costs_table(seconds: Mapping[Point, Sequence[float]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The file that `costs` of `SGLANG_DDTREE_CONFIG` names: width -> batch size -> median seconds."""
    table: dict[str, dict[str, float]] = {}
    for point, found in seconds.items():
        row = table.setdefault(str(point.budget + 1), {})
        row[str(point.batch)] = round(statistics.median(found), 7)
    return {"schema": 1, "kind": "ddtree-step-costs", "seconds": table, "about": dict(about)}


def _budgets(job: CostsJob, info: Mapping[str, Any]) -> list[int]:
    block = info.get("ddtree")
    block = block if isinstance(block, Mapping) else {}
    captured = block.get("budgets")
    if not captured and not block.get("per_request_budget"):
        raise BadInput(
            f"{job.url}: found a server of one width, allowed: one that takes a budget of every request",
            remedy="start it with several: SGLANG_DDTREE_CONFIG='{\"widths\": [16, 32, 64]}'",
        )
    if job.budgets is None:
        if not captured:
            raise BadInput(f"{job.url}: names no budgets", remedy="say which with --budget 15,31,63")
        return sorted(captured)
    for budget in job.budgets:
        if captured and budget not in captured:
            raise BadInput.at(
                file=job.url, key="--budget", found=budget, allowed=", ".join(map(str, captured))
            )
    return sorted(set(job.budgets))


async def _measure(
    job: CostsJob, prompt: Prompt, points: Sequence[Point], sink: Output
) -> dict[Point, list[float]]:
    rng = random.Random(0)
    seconds: dict[Point, list[float]] = {point: [] for point in points}
    async with new_session(max(point.batch for point in points)) as session:
        with sink.progress("points", len(points) * (job.rounds + 1)) as advance:
            for number in range(job.rounds + 1):
                for point in rng.sample(points, len(points)):
                    found = await _step_seconds(session, job, prompt, point)
                    if number:  # the first round warms up
                        seconds[point].append(found)
                    advance(1, str(point))
    return seconds


async def _step_seconds(session: aiohttp.ClientSession, job: CostsJob, prompt: Prompt, point: Point) -> float:
    (few, short), (many, long) = [
        await _together(session, job.url, prompt, point, tokens) for tokens in (SHORT, SHORT + job.tokens)
    ]
    if many - few < LEAST_STEPS:
        raise JobFailed(
            f"{point}: {many} steps for {SHORT + job.tokens} tokens are too few to time",
            remedy="use longer outputs (--max-tokens)",
        )
    return (long - short) / (many - few)


async def _together(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, point: Point, tokens: int
) -> tuple[int, float]:
    """Steps and seconds until the last of a batch of equal requests has its tokens."""
    sampling = {
        "max_new_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "custom_params": {"ddtree_budget": point.budget},
    }
    request = {**prompt.request(), "sampling_params": sampling}
    answers = await asyncio.gather(
        *(
            generate(session, url.rstrip("/"), request, timeout_s=REQUEST_TIMEOUT_S)
            for _ in range(point.batch)
        )
    )
    steps = [_steps(answer, point) for answer in answers]
    return max(steps), max(answer.e2e_s or 0.0 for answer in answers)


def _steps(answer: Answer, point: Point) -> int:
    if answer.error is not None:
        raise JobFailed(f"{point}: {answer.error}")
    steps = answer.meta_info.get("spec_verify_ct")
    if not isinstance(steps, int):
        raise JobFailed(f"{point}: the answer has no meta_info.spec_verify_ct: is it an arm that drafts?")
    return steps
