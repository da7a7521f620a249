"""The load on a block of cells: warm-up, parity probe, and the requests that are measured, arms in turn.

A service with several replicas is loaded as a whole: all replicas answer every prompt, at the same time, each
with as many requests in flight as the cell's concurrency. So its replicas are compared on the same work,
and what they give together is what the service gives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from ddtree_ops.bench.client import generate
from ddtree_ops.bench.crew import Crew, gather_all
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.bench.interleave import prompt_rounds, rotated
from ddtree_ops.bench.parity import TargetProbe, first_difference
from ddtree_ops.bench.plan import WARMUP_TOKENS, Block, Plan, PlannedCell
from ddtree_ops.bench.progress import Progress, Stay
from ddtree_ops.bench.rows import build_request, make_row
from ddtree_ops.bench.store import Store
from ddtree_ops.output import Advance, Output
from ddtree_ops.redact import redact_text
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import ParityClass, RequestRow, RequestStatus
from ddtree_ops.services.base import Service
from ddtree_ops.services.counters import growth, settled_totals
from ddtree_ops.services.readiness import ServiceDied, require_alive_after_failure

#: A cell whose requests fail so often in a row is given up, lest a sweep spend its night in timeouts.
GIVE_UP_AFTER = 3
FLUSH_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 200

Stamp = Callable[[], str]
#: Totals of a service's replicas, in order; null for one that keeps none.
Totals = list[dict[str, int] | None]


class Loader:
    """Sends what the cells of a run need and keeps its rows.

    order  number of the next request in the run's order of sending
    stamp  the time now, as records have it
    """

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        store: Store,
        out: Output,
        session: aiohttp.ClientSession,
        advance: Advance,
        *,
        order: int,
        stamp: Stamp,
    ) -> None:
        self._plan = plan
        self._crew = crew
        self._store = store
        self._out = out
        self._session = session
        self._advance = advance
        self._order = order
        self._stamp = stamp

    async def load(
        self, block: Block, cells: Sequence[Progress], stay: Stay, company: Sequence[Progress] = ()
    ) -> None:
        """What these cells of a block still lack in a stay.

        company  with services side by side: cells that are measured already and are loaded along
        """
        for progress in cells:
            progress.started = progress.started or self._stamp()
        await self._warm_up(cells, stay)
        await self._probe_parity(cells)
        before = await self._totals(cells)
        if self._plan.sweep.side_by_side:
            await self._side_by_side(cells, company, stay, block.concurrency)
        elif block.concurrency == 1:
            await self._one_by_one(cells, stay)
        else:
            await self._closed_loop(cells, stay, block.concurrency)
        after = await self._totals(cells)
        for progress in cells:
            name = progress.cell.service.name
            if name in before:
                progress.add_totals(_growth(before[name], after.get(name, [])))

    async def _warm_up(self, cells: Sequence[Progress], stay: Stay) -> None:
        """Requests that are dropped: they pay for first shapes, and their outputs are the parity probe."""
        for progress in cells:
            await gather_all(self._warm_up_replica(progress, stay, number) for number in progress.replicas)

    async def _warm_up_replica(self, progress: Progress, stay: Stay, number: int) -> None:
        prompts = self._plan.dataset.prompts
        for turn in range(progress.cell.spec.warmup):
            if not progress.open:
                break
            prompt = prompts[turn % len(prompts)]
            row = await self._send(
                progress, stay, number, prompt, turn, 0, 0, max_tokens=WARMUP_TOKENS, measured=False
            )
            if row.status is RequestStatus.FAILED:
                await self._note_failure(progress, number, f"warm-up: {row.error}", at_once=True)
            if turn == 0:
                progress.warm_outputs[number] = row.output_ids

    async def _probe_parity(self, cells: Sequence[Progress]) -> None:
        """Give up before any timing on an arm whose very first tokens are not the target's."""
        reference = next((one for one in cells if one.cell.spec.arm is Arm.AR and one.open), None)
        expected = reference.warm_outputs.get(0) if reference else None
        if reference is None or not expected or reference.cell.spec.temperature > 0:
            return
        prompt = self._plan.dataset.prompts[0]
        for progress in cells:
            for output in progress.warm_outputs.values():
                if not output or not progress.cell.spec.arm.lossless or not progress.open:
                    continue
                difference = first_difference(prompt.id, output, expected)
                if difference is None:
                    continue
                probe = target_probe(self._crew, self._session, self._plan, progress.cell)
                gap = await probe.gap(difference) if probe else None
                if gap is not None and gap.parity is ParityClass.DIFFERENT:
                    progress.invalid = (
                        f"parity probe: {prompt.id}: output token {difference.index} is {difference.token}, "
                        f"ar gives {difference.reference_token}; "
                        f"gap {gap.gap:.2g}, near-ties end at {gap.threshold:.2g}"
                    )
                    self._out.warning(f"{progress.cell.name}: {progress.invalid}")

    async def _one_by_one(self, cells: Sequence[Progress], stay: Stay) -> None:
        prompts = self._plan.dataset.prompts
        for round_, repeat, index in prompt_rounds(len(prompts), stay.repeats):
            rows: list[tuple[Progress, list[RequestRow]]] = []
            for progress in rotated(cells, round_):
                todo = [number for number in progress.replicas if not progress.done(repeat, index, number)]
                if not progress.open or not todo:
                    continue
                await self._flush(progress, todo)
                sent = await gather_all(
                    self._send(progress, stay, number, prompts[index], index, repeat, round_)
                    for number in todo
                )
                rows.append((progress, sent))
                self._advance(len(sent), progress.cell.name)
            for progress, sent in rows:
                self._keep(progress, sent)

    async def _closed_loop(self, cells: Sequence[Progress], stay: Stay, concurrency: int) -> None:
        for repeat in stay.repeats:
            for progress in rotated(cells, repeat):
                todo = self._todo(progress, repeat)
                if not progress.open or not todo:
                    continue
                await self._flush(progress, list(todo))
                rows = await self._pass(progress, stay, repeat, concurrency, todo)
                self._keep(progress, sorted(rows, key=lambda row: row.order))

    async def _side_by_side(
        self, cells: Sequence[Progress], company: Sequence[Progress], stay: Stay, concurrency: int
    ) -> None:
        """All services at the same time. One that is through with its prompts gets them again, and those
        answers are dropped: until the last one is through, none has an idle neighbour.
        """
        for repeat in stay.repeats:
            if not all(progress.open for progress in (*cells, *company)):
                break
            todo = {progress: self._todo(progress, repeat) for progress in cells}
            if not any(todo.values()):
                continue
            todo |= {progress: {} for progress in company}
            await gather_all(self._flush(progress, progress.replicas) for progress in todo)
            meter = Meter(
                sum(min(concurrency, len(some)) for mine in todo.values() for some in mine.values())
            )
            everyone = list(todo)
            passes = await gather_all(
                self._pass(progress, stay, repeat, concurrency, todo[progress], meter)
                for progress in everyone
            )
            for progress, rows in zip(everyone, passes, strict=True):
                if rows:
                    self._keep(progress, sorted(rows, key=lambda row: row.order))
        lost = [progress.cell.name for progress in (*cells, *company) if not progress.open]
        for progress in cells:
            if lost and progress.open:
                progress.invalid = f"it was loaded beside {', '.join(lost)}, which ended early"

    def _todo(self, progress: Progress, repeat: int) -> dict[int, list[int]]:
        """By replica: the prompts that it has not answered in a repeat; one that has all is left out."""
        prompts = range(len(self._plan.dataset.prompts))
        todo = {
            number: [index for index in prompts if not progress.done(repeat, index, number)]
            for number in progress.replicas
        }
        return {number: indices for number, indices in todo.items() if indices}

    async def _pass(
        self,
        progress: Progress,
        stay: Stay,
        repeat: int,
        concurrency: int,
        todo: Mapping[int, Sequence[int]],
        meter: Meter | None = None,
    ) -> list[RequestRow]:
        """One repeat of a cell: a closed loop on each replica, all at the same time.

        meter  null: a replica that is through is left alone; else it goes on until nobody is measured
        """
        prompts = self._plan.dataset.prompts
        rows: list[RequestRow] = []

        async def measure(number: int, queue: Iterator[int]) -> None:
            for index in queue:
                if not progress.open:
                    return
                rows.append(await self._send(progress, stay, number, prompts[index], index, repeat, repeat))
                self._advance(1, progress.cell.name)

        async def worker(number: int, queue: Iterator[int], *, measures: bool, turn: int) -> None:
            if measures:
                await measure(number, queue)
            if meter is None:
                return
            meter.running -= measures
            while meter.running > 0 and progress.open:
                index = turn % len(prompts)
                row = await self._send(
                    progress, stay, number, prompts[index], index, repeat, repeat, measured=False
                )
                if row.status is RequestStatus.FAILED:
                    await self._note_failure(progress, number, f"beside others: {row.error}")
                turn += 1

        busy = progress.replicas if meter is not None else todo
        await gather_all(
            worker(number, queue, measures=turn < len(indices), turn=turn)
            for number in busy
            for indices in [todo.get(number, ())]
            for queue in [iter(indices)]
            for turn in range(concurrency if meter is not None else min(concurrency, len(indices)))
        )
        return rows

    async def _send(
        self,
        progress: Progress,
        stay: Stay,
        number: int,
        prompt: Prompt,
        index: int,
        repeat: int,
        round_: int,
        *,
        max_tokens: int | None = None,
        measured: bool = True,
    ) -> RequestRow:
        cell, order = progress.cell, self._order
        self._order += 1
        request = build_request(
            prompt,
            cell.spec,
            seed=request_seed(cell.spec.seed, index, repeat),
            max_tokens=min(max_tokens or cell.spec.max_tokens, cell.spec.max_tokens),
            per_request_budget=cell.service.budget is None,
        )
        url, timeout_s = self._replica(progress, number).url, self._plan.sweep.request_timeout_s
        answer = await generate(self._session, url, request, timeout_s=timeout_s)
        at = self._crew.at(cell.service.name, number, stay)
        row = make_row(
            answer,
            cell.spec,
            prompt=prompt,
            prompt_index=index,
            repeat=repeat,
            round_=round_,
            order=order,
            position=stay.position,
            place=at.place if at is not None and self._plan.rotation is not None else None,
            replica=at,
        )
        if measured:
            if row.status is RequestStatus.FAILED:
                await self._note_failure(progress, number, row.error or "failed")
            else:
                progress.failures_in_a_row[number] = 0
        return row

    async def _note_failure(
        self, progress: Progress, number: int, error: str, *, at_once: bool = False
    ) -> None:
        """After a failed request: is the replica dead, or failing so often that going on is pointless?"""
        progress.failures_in_a_row[number] += 1
        service = self._replica(progress, number)
        try:
            await require_alive_after_failure(service)
        except ServiceDied as death:
            progress.given_up, progress.died = death.message, True
            self._crew.dead.add(progress.cell.service.name)
        else:
            if at_once:
                progress.given_up = error
            elif progress.failures_in_a_row[number] >= GIVE_UP_AFTER:
                progress.given_up = (
                    f"given up after {GIVE_UP_AFTER} failed requests in a row, the last: {error}"
                )
        progress.logs[service.spec.label] = redact_text(service.log_tail(LOG_TAIL_LINES))
        if progress.given_up:
            self._out.warning(f"{progress.cell.name}: {progress.given_up}")

    async def _flush(self, progress: Progress, numbers: Sequence[int]) -> None:
        """Empty the prefix caches. Whether that worked shows in the requests' cached tokens, which a gate
        reads.
        """

        async def flush(number: int) -> None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
                url = f"{self._replica(progress, number).url}/flush_cache?timeout=10"
                async with self._session.post(url, timeout=timeout) as answer:
                    await answer.read()

        await gather_all(flush(number) for number in numbers)

    def _replica(self, progress: Progress, number: int) -> Service:
        """A replica of the cell's service as it runs now: after a move it is another one."""
        return self._crew.replica(progress.cell.service.name, number)

    def _keep(self, progress: Progress, rows: list[RequestRow]) -> None:
        progress.rows.extend(rows)
        self._store.append_partial(progress.cell.key, rows)

    async def _totals(self, cells: Sequence[Progress]) -> dict[str, Totals]:
        """Totals of the servers that keep some and serve one of these cells only, whose own they then are."""
        names = Counter(progress.cell.service.name for progress in cells)
        alone = [name for name, count in names.items() if count == 1]

        async def read(service: Service) -> dict[str, int] | None:
            async def ask() -> Mapping[str, Any] | None:
                try:
                    info = await server_info(service, self._session)
                except (aiohttp.ClientError, TimeoutError, ValueError):
                    return None
                return info if isinstance(info, Mapping) else None

            return await settled_totals(ask) if service.alive() else None

        return {name: await gather_all(read(one) for one in self._crew.replicas(name)) for name in alone}


@dataclass
class Meter:
    """How many closed loops are still measured, of services that are loaded side by side."""

    running: int


async def server_info(service: Service, session: aiohttp.ClientSession) -> Any:
    """What `/server_info` says now. Raises ClientError, TimeoutError or ValueError where it says nothing."""
    timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
    async with session.get(f"{service.url}/server_info", timeout=timeout) as answer:
        return await answer.json(content_type=None)


def target_probe(
    crew: Crew, session: aiohttp.ClientSession, plan: Plan, cell: PlannedCell
) -> TargetProbe | None:
    """Whom to ask for the target's logits: `ar`, or any lossless arm where there is none (a prefill is a
    prefill).
    """
    order = (Arm.AR, Arm.DFLASH, Arm.SHADOW, Arm.DDTREE)
    living = [service for service in crew.living() if service.spec.arm in order]
    if not living:
        return None
    service = min(living, key=lambda one: order.index(one.spec.arm))
    prompts = {prompt.id: prompt for prompt in plan.dataset.prompts}
    return TargetProbe(session, service.url, prompts, dtype=cell.spec.dtype, timeout_s=PROBE_TIMEOUT_S)


def request_seed(seed: int, index: int, repeat: int) -> int:
    """A seed for each request that all arms share, so that the same prompt draws the same numbers."""
    return (seed * 1_000_003 + repeat * 10_007 + index) % 2**31


def _growth(before: Totals, after: Totals) -> dict[str, int] | None:
    """How the totals of all replicas grew together; null where one of them is not known."""
    grown = [growth(first, last) for first, last in zip(before, after, strict=False)]
    known = [one for one in grown if one is not None]
    if not known or len(known) < len(before):
        return None
    return {name: sum(one[name] for one in known) for name in known[0]}
