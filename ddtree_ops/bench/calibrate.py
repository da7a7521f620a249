"""`ddtree bench calibrate`: log steps, fit on some prompts, judge on others, write the file.

The tree core (`ddtree_engine.tree`, numpy only, no engine in it) is imported here to say what both builders
would have accepted on the judged steps; it is the one part of the engine's package that the operator's side
uses.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from ddtree_ops.bench.calibration_fit import (
    LOGPROB_FLOOR,
    Examples,
    Step,
    Table,
    collect_examples,
    fit_table,
    log_loss,
    reliability,
)
from ddtree_ops.bench.client import new_session, post_json
from ddtree_ops.bench.dataset import Prompt, load_dataset
from ddtree_ops.bench.environment import engine_version
from ddtree_ops.errors import BadInput, Interrupted, JobFailed
from ddtree_ops.files import write_json
from ddtree_ops.output import Advance, Output
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.sweep import ArmChoice, LocalEngine, Sweep
from ddtree_ops.services.argv import find_models, local_services
from ddtree_ops.services.base import ServiceSpec
from ddtree_ops.services.discover import fetch_server_info
from ddtree_ops.services.local import LocalLauncher
from ddtree_ops.services.readiness import require_alive, wait_ready

JUDGE_EVERY = 3
JUDGE_BUDGETS = (7, 15, 31, 63)
LOG_BUDGET = 31
REQUEST_TIMEOUT_S = 300.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CalibrationJob:
    """What to calibrate on.

    url            a running server of an arm that drafts; null: a `ddtree` service of our own
    dataset        prompts to fit on
    judge_dataset  prompts to judge on; null: every third of `dataset` is kept for that
    prompts        how many of each, from the start; null: all
    """

    url: str | None
    dataset: str
    judge_dataset: str | None
    prompts: int | None
    max_tokens: int
    model: Path | None
    drafter: Path | None
    topk: int
    threads: int
    command: list[str] | None = None


def run_calibration(job: CalibrationJob, out: Path, sink: Output) -> dict[str, Any]:
    """Log, fit, judge, write `out`, print. Returns the judgement.

    Raises BadInput (dataset, models, too few prompts), BadEnvironment (no server, no disk), JobFailed (a
    request failed, the server logs no steps).
    """
    to_fit, to_judge, about = _datasets(job)
    if not out.parent.is_dir():
        raise BadInput(f"--out: {out.parent} is no folder")
    try:
        logged = asyncio.run(_log_steps(job, [*to_fit, *to_judge], sink))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted("stopped; nothing was written") from None
    fitted = [step for steps in logged[: len(to_fit)] for step in steps]
    judged = [step for steps in logged[len(to_fit) :] for step in steps]
    calibration = fit(fitted, judged, {**about, "engine_version": engine_version()})
    write_json(out, calibration)
    judgement: dict[str, Any] = calibration["fit"]["judged"]
    _show(judgement, sink)
    sink.result({"file": str(out), **calibration["fit"]}, summary=f"calibration: {out}")
    return judgement


def _datasets(job: CalibrationJob) -> tuple[list[Prompt], list[Prompt], dict[str, Any]]:
    """Prompts to fit on, other prompts to judge on, and what the file says of them."""
    dataset = load_dataset(job.dataset, job.prompts)
    about = {"dataset": dataset.name, "dataset_sha256": dataset.sha256}
    if job.judge_dataset is None:
        if len(dataset.prompts) < JUDGE_EVERY:
            raise BadInput(f"calibrate: found {len(dataset.prompts)} prompts, allowed: {JUDGE_EVERY} or more")
        return *split_prompts(dataset.prompts), about
    other = load_dataset(job.judge_dataset, job.prompts)
    shared = {prompt.request_key() for prompt in dataset.prompts} & {p.request_key() for p in other.prompts}
    if shared:
        raise BadInput(f"calibrate: {len(shared)} prompts are in {dataset.name} and in {other.name}")
    about |= {"judge_dataset": other.name, "judge_dataset_sha256": other.sha256}
    return list(dataset.prompts), list(other.prompts), about


def split_prompts(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to fit on and prompts to judge on: every third is kept for judging."""
    fitted = [prompt for index, prompt in enumerate(prompts) if index % JUDGE_EVERY != 2]
    judged = [prompt for index, prompt in enumerate(prompts) if index % JUDGE_EVERY == 2]
    return fitted, judged


def fit(fitted: Sequence[Step], judged: Sequence[Step], about: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration file's content, with its judgement under `fit`."""
    if not fitted or not judged:
        raise JobFailed("calibrate: no steps were logged", remedy="use longer outputs (--max-tokens)")
    positions, topk = fitted[0].ids.shape
    sides = dict(zip(("on", "off"), collect_examples(fitted), strict=True))
    tables = {side: fit_table(examples, positions, topk) for side, examples in sides.items()}
    content: dict[str, Any] = {
        "schema": 1,
        "kind": "ddtree-calibration",
        "block": positions + 1,
        "topk": topk,
        "logprob_floor": LOGPROB_FLOOR,
        **{side: _numbers(table) for side, table in tables.items()},
    }
    content["fit"] = {
        **about,
        "steps": len(fitted),
        "examples": {side: len(examples) for side, examples in sides.items()},
        "judged": judge(content, tables, judged),
    }
    return content


def judge(content: Mapping[str, Any], tables: Mapping[str, Table], steps: Sequence[Step]) -> dict[str, Any]:
    """How well the fit does on steps of other prompts: log-loss, reliability, and what trees would have
    accepted.
    """
    sides = dict(zip(("on", "off"), collect_examples(steps), strict=True))
    return {
        "steps": len(steps),
        **{side: _judge_side(tables[side], examples) for side, examples in sides.items() if len(examples)},
        "accept_length": _judge_trees(content, steps),
    }


def _judge_side(table: Table, examples: Examples) -> dict[str, Any]:
    chance = table.chance(examples)
    return {
        "examples": len(examples),
        "log_loss": log_loss(chance, examples.label),
        "log_loss_raw": log_loss(np.exp(examples.logprob), examples.label),
        "reliability": reliability(chance, examples.label),
    }


def _judge_trees(content: Mapping[str, Any], steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Mean accept length by budget and builder on steps whose truth reaches to the end of the block.

    An estimate: the anchors are those of the decoding that was logged.
    """
    from ddtree_engine.tree import Builder, build_tree, parse_calibration, tree_accept

    calibration = parse_calibration(dict(content))
    whole = [step for step in steps if len(step.truth) >= len(step.ids)]
    found = []
    for budget in JUDGE_BUDGETS:
        entry: dict[str, Any] = {"budget": budget, "steps": len(whole)}
        for builder in Builder:
            fitted = calibration if builder is Builder.CALIBRATED else None
            accepted = [
                1 + tree_accept(build_tree(0, step.ids, step.logprobs, budget, builder, fitted), step.truth)
                for step in whole
            ]
            entry[builder.value] = float(np.mean(accepted)) if accepted else None
        found.append(entry)
    return found


async def _log_steps(job: CalibrationJob, prompts: Sequence[Prompt], sink: Output) -> list[list[Step]]:
    """Steps of every prompt, decoded greedily one after the other."""
    with _service(job) as (url, service):
        if service is not None:
            golden = prompts[0].request()
            await wait_ready(service, golden, timeout_s=START_TIMEOUT_S, note=sink.note)
        async with new_session(1) as session:
            with sink.progress("prompts", len(prompts)) as advance:
                return [
                    await _log_prompt(session, url, prompt, job.max_tokens, service, advance)
                    for prompt in prompts
                ]


async def _log_prompt(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    max_tokens: int,
    service: Any,
    advance: Advance,
) -> list[Step]:
    sampling = {
        "max_new_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "custom_params": {"ddtree_return_steps": True},
    }
    request = {**prompt.request(), "sampling_params": sampling}
    try:
        answer = await post_json(session, url, "/generate", request, timeout_s=REQUEST_TIMEOUT_S)
        steps = read_steps(answer)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        if service is not None:
            require_alive(service)
        raise JobFailed(f"calibrate: {prompt.id}: {error or type(error).__name__}") from error
    advance(1, prompt.id)
    return steps


def read_steps(answer: Mapping[str, Any]) -> list[Step]:
    """The logged steps of a `/generate` answer. Raises ValueError when there are none in it."""
    tables = ((answer.get("meta_info") or {}).get("ddtree") or {}).get("steps")
    if tables is None:
        raise ValueError("the server logs no steps (meta_info.ddtree.steps): is it an arm that drafts?")
    output = answer["output_ids"]
    return [
        Step(
            np.asarray(table["ids"], dtype=np.int64),
            np.asarray(table["logprobs"], dtype=np.float64),
            tuple(output[table["anchor"] + 1 :]),
        )
        for table in tables
    ]


@contextmanager
def _service(job: CalibrationJob) -> Iterator[tuple[str, Any]]:
    """The server's address and, where it is ours, the service."""
    if job.url is not None:
        fetch_server_info(job.url)
        yield job.url.rstrip("/"), None
        return
    with tempfile.TemporaryDirectory(prefix="ddtree-calibrate-") as folder:
        service = LocalLauncher(Path(folder)).create(_local_spec(job))
        try:
            service.start()
            yield service.url, service
        finally:
            service.stop()


def _local_spec(job: CalibrationJob) -> ServiceSpec:
    engine = LocalEngine(
        model=job.model, drafter=job.drafter, topk=job.topk, threads=job.threads, command=job.command
    )
    sweep = Sweep(engine=engine, arms=[ArmChoice(arm=Arm.DDTREE)], budgets=[LOG_BUDGET])
    return local_services(sweep, find_models(engine), engine_version())[0]


def _numbers(table: Table) -> dict[str, Any]:
    return {
        "depth": [round(float(value), 6) for value in table.depth],
        "rank": [round(float(value), 6) for value in table.rank],
        "slope": round(table.slope, 6),
    }


def _show(judgement: Mapping[str, Any], sink: Output) -> None:
    rows = [
        [
            side,
            judgement[side]["examples"],
            f"{judgement[side]['log_loss']:.4f}",
            f"{judgement[side]['log_loss_raw']:.4f}",
        ]
        for side in ("on", "off")
        if side in judgement
    ]
    sink.table("On prompts not fitted on", ["spine", "examples", "log-loss", "raw log-loss"], rows)
    trees = judgement["accept_length"]
    names = [name for name in trees[0] if name not in {"budget", "steps"}]
    cells = [
        [
            entry["budget"],
            entry["steps"],
            *("-" if entry[name] is None else f"{entry[name]:.3f}" for name in names),
        ]
        for entry in trees
    ]
    sink.table("Accept length on logged steps (an estimate)", ["budget", "steps", *names], cells)
