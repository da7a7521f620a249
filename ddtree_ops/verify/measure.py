"""Asks the services: greedy answers to the same prompts, counters around them, the target's exactness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ddtree_ops.bench.client import Answer, generate, post_json
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.bench.parity import TargetProbe, compare
from ddtree_ops.bench.rows import missing_fields
from ddtree_ops.errors import BadEnvironment
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import Parity, RequestRow, RequestStatus
from ddtree_ops.services.counters import growth, settled_totals
from ddtree_ops.verify.subjects import Address, Subject, server_info

NOISE_PROMPTS, NOISE_TOKENS, NOISE_EVERY = 3, 25, 6
TOGETHER = 4
REFERENCES = (Arm.DFLASH, Arm.AR)
TOP_LOGPROBS = 16

Step = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What every service is asked. Greedy, one request at a time."""

    prompts: Sequence[Prompt]
    max_tokens: int
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Findings:
    """Everything that the gates are judged by.

    rows      by service: answers with the service's own builder
    spines    by service: answers with spine-first trees, where a request may ask for them or the server
              grows them anyway
    counters  by service: how the server's totals grew over `rows`; only servers that keep such totals
    parities  by service: against every reference arm that is there
    noise     largest change of a log-probability between valid executions of one prefix, by dtype; null
              where it could not be measured
    """

    subjects: Sequence[Subject]
    load: Load
    rows: Mapping[str, Sequence[RequestRow]]
    spines: Mapping[str, Sequence[RequestRow]] = field(default_factory=dict)
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parities: Mapping[str, Sequence[Parity]] = field(default_factory=dict)
    noise: Mapping[str, float | None] = field(default_factory=dict)


async def measure(subjects: Sequence[Subject], load: Load, step: Step = lambda text: None) -> Findings:
    """Ask all services. Requests that fail are rows with an error; nothing is raised for them.

    step  called once for every answer
    """
    rows, spines, counters = {}, {}, {}
    for subject in subjects:
        before = await _totals(subject.address)
        rows[subject.name] = await _answers(subject, load, step)
        grown = growth(before, await _totals(subject.address)) if before is not None else None
        if grown is not None:
            counters[subject.name] = grown
        if subject.arm is Arm.DDTREE and holds_spine(subject):
            if subject.builder is Builder.SPINE_FIRST:
                spines[subject.name] = rows[subject.name]
            elif subject.per_request:
                custom = {"ddtree_builder": Builder.SPINE_FIRST.value, "ddtree_budget": spine_budget(subject)}
                spines[subject.name] = await _answers(subject, load, step, custom)
    judge = _judge_of(subjects)
    noise = {dtype: await _noise(judge, load) for dtype in {subject.dtype for subject in subjects}}
    parities = await _parities(subjects, load, rows, judge)
    return Findings(subjects, load, rows, spines, counters, parities, noise)


def answers_to_expect(subjects: Sequence[Subject], prompts: int) -> int:
    """How often `step` will be called."""
    again = [one for one in subjects if one.arm is Arm.DDTREE and one.per_request and holds_spine(one)]
    twice = [one for one in again if one.builder is not Builder.SPINE_FIRST]
    return prompts * (len(subjects) + len(twice))


def holds_spine(subject: Subject) -> bool:
    """A budget below F-1 cuts the spine itself, and what was cut off cannot be accepted."""
    return subject.per_request or (subject.budget or 0) >= subject.block - 1


def spine_budget(subject: Subject) -> int:
    return max(subject.default_budget or 0, subject.block - 1)


async def _totals(address: Address) -> dict[str, int] | None:
    """Null for a server that keeps none, and for one that died: its requests say so."""

    async def ask() -> dict[str, Any] | None:
        try:
            return await server_info(address)
        except BadEnvironment:
            return None

    return await settled_totals(ask)


async def _answers(
    subject: Subject, load: Load, step: Step, custom: Mapping[str, Any] | None = None
) -> list[RequestRow]:
    rows = []
    async with subject.session() as session:
        for index, prompt in enumerate(load.prompts):
            request = {**prompt.request(), "sampling_params": _greedy(load.max_tokens)}
            if custom:
                request["sampling_params"]["custom_params"] = dict(custom)
            await _flush(session, subject.url)
            answer = await generate(session, subject.url, request, timeout_s=load.timeout_s)
            rows.append(_row(answer, subject, prompt, index))
            step(subject.name)
    return rows


def _greedy(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}


async def _flush(session: aiohttp.ClientSession, url: str) -> None:
    """A prefix from the cache would be another valid execution; a cold one makes repeats equal."""
    try:
        async with session.post(f"{url}/flush_cache", timeout=aiohttp.ClientTimeout(total=15)) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return


def _row(answer: Answer, subject: Subject, prompt: Prompt, index: int) -> RequestRow:
    meta = answer.meta_info
    block = meta.get("ddtree") or {}
    error = answer.error or missing_fields(answer, subject.arm)
    return RequestRow(
        prompt_id=prompt.id,
        prompt_index=index,
        repeat=0,
        round=index,
        order=index,
        sent_at=answer.sent_at,
        status=RequestStatus.FAILED if error else RequestStatus.OK,
        error=error,
        completion_tokens=len(answer.output_ids),
        output_ids=answer.output_ids,
        verify_steps=meta.get("spec_verify_ct"),
        accept_histogram=meta.get("spec_correct_drafts_histogram") or [],
        tree_steps=block.get("tree_steps"),
        steps_below_spine=block.get("steps_below_spine"),
        steps_scored=block.get("steps_scored"),
    )


def _judge_of(subjects: Sequence[Subject]) -> Subject:
    """Whom to ask for the target's log-probabilities: a prefill is a prefill, so the plainest will do."""
    order = (Arm.AR, Arm.DFLASH, Arm.SHADOW, Arm.DDTREE, Arm.UNSAFE)
    return min(subjects, key=lambda subject: order.index(subject.arm))


async def _parities(
    subjects: Sequence[Subject], load: Load, rows: Mapping[str, Sequence[RequestRow]], judge: Subject
) -> dict[str, list[Parity]]:
    references = {
        arm: next((one for one in subjects if one.arm is arm), None) for arm in (Arm.DFLASH, Arm.AR)
    }
    prompts = {prompt.id: prompt for prompt in load.prompts}
    found: dict[str, list[Parity]] = {}
    async with judge.session() as session:
        for subject in subjects:
            probe = TargetProbe(session, judge.url, prompts, dtype=subject.dtype, timeout_s=load.timeout_s)
            found[subject.name] = [
                await compare(rows[subject.name], rows[reference.name], arm, probe)
                for arm, reference in references.items()
                if reference is not None and subject.arm not in {Arm.AR, arm}
            ]
    return found


async def _noise(judge: Subject, load: Load) -> float | None:
    """Decode some tokens; prefill some of their prefixes alone and several at once; compare what each says
    of the same place. Null when the server cannot say.
    """
    worst, places = 0.0, 0
    try:
        async with judge.session() as session:
            for prompt in load.prompts[:NOISE_PROMPTS]:
                ids = await _prompt_ids(session, judge, prompt, load)
                decoded = await _ask(session, judge, ids, NOISE_TOKENS, load)
                output, tops = decoded["output_ids"], decoded["meta_info"]["output_top_logprobs"]
                for place in range(1, min(len(output), NOISE_TOKENS), NOISE_EVERY):
                    prefix = [*ids, *output[:place]]
                    alone = await _ask(session, judge, prefix, 1, load)
                    batch = await asyncio.gather(
                        *(_ask(session, judge, prefix, 1, load) for _ in range(TOGETHER))
                    )
                    executions = [_chances(tops[place])]
                    executions += [
                        _chances(one["meta_info"]["output_top_logprobs"][0]) for one in (alone, *batch)
                    ]
                    worst, places = max(worst, _spread(executions)), places + 1
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
        return None
    return worst if places else None


async def _prompt_ids(
    session: aiohttp.ClientSession, judge: Subject, prompt: Prompt, load: Load
) -> list[int]:
    if prompt.input_ids is not None:
        return list(prompt.input_ids)
    answer = await _ask(session, judge, prompt.request(), 1, load, logprob_start_len=0)
    return [int(entry[1]) for entry in answer["meta_info"]["input_token_logprobs"]]


async def _ask(
    session: aiohttp.ClientSession,
    judge: Subject,
    prompt: list[int] | Mapping[str, Any],
    tokens: int,
    load: Load,
    **more: Any,
) -> dict[str, Any]:
    request = {
        **({"input_ids": prompt} if isinstance(prompt, list) else prompt),
        "sampling_params": _greedy(tokens),
        "return_logprob": True,
        "top_logprobs_num": TOP_LOGPROBS,
        **more,
    }
    return await post_json(session, judge.url, "/generate", request, timeout_s=load.timeout_s)


def _chances(entries: Sequence[Sequence[Any]]) -> dict[int, float]:
    return {int(entry[1]): float(entry[0]) for entry in entries}


def _spread(executions: Sequence[Mapping[int, float]]) -> float:
    """The largest difference that any two executions have for a token that all of them name."""
    common = set.intersection(*(set(one) for one in executions))
    values = [[one[token] for one in executions] for token in common]
    return max((max(row) - min(row) for row in values), default=0.0)
