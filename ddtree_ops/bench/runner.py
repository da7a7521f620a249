"""Runs a plan: services up, ready, probed, warmed, loaded in turns; cells judged and sealed; services down.

One sweep is one pass through :meth:`SweepRunner.run`. Whatever ends it, services are stopped and what was
finished is kept: sealed cells, and the rounds of cells that are not sealed yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp

from ddtree_ops.bench.client import generate, new_session
from ddtree_ops.bench.crew import Crew, gather_all
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.bench.gates import DEFAULT_BLOCK, Evidence, judge
from ddtree_ops.bench.interleave import prompt_rounds, rotated
from ddtree_ops.bench.parity import TargetProbe, compare, first_difference
from ddtree_ops.bench.plan import WARMUP_TOKENS, Block, Plan, PlannedCell, cell_name
from ddtree_ops.bench.progress import Progress, Stay, stays
from ddtree_ops.bench.rows import build_request, make_row
from ddtree_ops.bench.store import Store
from ddtree_ops.errors import Interrupted, JobFailed
from ddtree_ops.output import Advance, Output
from ddtree_ops.redact import redact_text
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import (
    CellRecord,
    CellState,
    Environment,
    Parity,
    ParityClass,
    RequestRow,
    RequestStatus,
    RunRecord,
)
from ddtree_ops.services.base import Launcher, Service
from ddtree_ops.services.counters import growth, settled_totals
from ddtree_ops.services.readiness import (
    ServiceDied,
    not_as_asked,
    require_alive_after_failure,
)
from ddtree_ops.services.rotation import Mover

#: A cell whose requests fail so often in a row is given up, lest a sweep spend its night in timeouts.
GIVE_UP_AFTER = 3
FLUSH_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 200
REFERENCES = (Arm.AR, Arm.DFLASH)

T = TypeVar("T")


@dataclass(frozen=True)
class SweepOutcome:
    """What a sweep left behind."""

    run: RunRecord
    cells: list[CellRecord]
    reused: list[str]
    not_run: list[str]

    @property
    def bad(self) -> list[CellRecord]:
        """Cells that failed or are invalid."""
        return [cell for cell in self.cells if cell.state is not CellState.COMPLETE]


def run_sweep(
    plan: Plan,
    store: Store,
    launcher_for: Callable[[str], Launcher],
    environment: Environment,
    out: Output,
    *,
    mover: Mover | None = None,
    retry_failed: bool = False,
) -> SweepOutcome:
    """Measure what is not sealed yet and seal it.

    launcher_for   run id -> launcher, so that logs lie with their run
    mover          for a plan with a rotation
    retry_failed   measure cells again that are sealed as failed or invalid; their old records are set aside
    Raises JobFailed when a service does not start, BadEnvironment when the store cannot be written or is in
    use, Interrupted on Ctrl-C and SIGTERM. Cells that fail are sealed as such and do not stop the others.
    """
    with store.lock():
        sealed = _sealed(plan, store)
        if retry_failed:
            for key, record in list(sealed.items()):
                if record.state is not CellState.COMPLETE:
                    store.set_aside(key)
                    del sealed[key]
        runner = SweepRunner(plan, store, launcher_for, environment, out, sealed, mover=mover)
        try:
            with _terminate_like_interrupt():
                return asyncio.run(runner.run())
        except (KeyboardInterrupt, asyncio.CancelledError):
            kept = sum(store.cell(cell.key) is not None for cell in plan.cells)
            raise Interrupted(
                f"stopped; {kept} of {len(plan.cells)} cells are sealed and finished rounds are kept",
                remedy="run the same command again to go on",
            ) from None


class SweepRunner:
    """One run of a plan over a locked store."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        launcher_for: Callable[[str], Launcher],
        environment: Environment,
        out: Output,
        sealed: dict[str, CellRecord],
        *,
        mover: Mover | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._store = store
        self._environment = environment
        self._out = out
        self._sealed = sealed
        self._reused = list(sealed)
        self._now = now
        self._clock = clock
        self._run_id = store.new_run_id(now().strftime("%Y%m%dT%H%M%SZ"), plan.sweep.name)
        self._crew = Crew(plan, launcher_for(self._run_id), mover, out)
        self._stay = Stay(0, range(0))
        self._begun: dict[str, Progress] = {}
        self._order = 0
        self._prompts = {prompt.id: prompt for prompt in plan.dataset.prompts}

    async def run(self) -> SweepOutcome:
        begun = self._clock()
        run = self._run_record()
        self._store.write_run(run)
        self._out.event("run", run_id=self._run_id, cells=len(self._plan.cells), reused=len(self._reused))
        if self._reused:
            self._out.note(
                f"{len(self._reused)} of {len(self._plan.cells)} cells are sealed already and are skipped"
            )
        try:
            if self._pending(self._plan.cells):
                await self._measure()
        finally:
            self._crew.stop()
        run = run.model_copy(update={"ended": self._stamp(), "seconds": round(self._clock() - begun, 3)})
        self._store.write_run(run)
        cells = [self._sealed[cell.key] for cell in self._plan.cells if cell.key in self._sealed]
        not_run = [cell.name for cell in self._plan.cells if cell.key not in self._sealed]
        return SweepOutcome(run, cells, self._reused, not_run)

    def _run_record(self) -> RunRecord:
        dataset = self._plan.dataset
        return RunRecord(
            run_id=self._run_id,
            name=self._plan.sweep.name,
            started=self._stamp(),
            sweep=self._plan.sweep.model_dump(mode="json", by_alias=True),
            environment=self._environment,
            cells=[cell.key for cell in self._plan.cells],
            reused=self._reused,
            dataset={"name": dataset.name, "sha256": dataset.sha256, "prompts": len(dataset.prompts)},
        )

    # Load

    async def _measure(self) -> None:
        pending = self._pending(self._plan.cells)
        self._begun = {cell.key: Progress(cell, self._store.partial(cell.key)) for cell in pending}
        kept = [row for progress in self._begun.values() for row in progress.rows]
        self._order = max((row.order + 1 for row in kept), default=0)
        left = stays(self._plan, self._begun.values())
        await self._take_up(left[0])
        most = max(block.concurrency for block in self._plan.blocks)
        headers = {name: text for spec in self._plan.services for name, text in spec.headers.items()}
        async with new_session(most, headers) as session:
            with self._out.progress("requests", sum(cell.requests for cell in pending)) as advance:
                if kept:
                    advance(len(kept), "kept from the interrupted run")
                for stay in left:
                    if stay is not left[0]:
                        await self._take_up(stay)
                    for block in self._plan.blocks:
                        await self._run_block(block, stay, session, advance)

    async def _take_up(self, stay: Stay) -> None:
        """Have what the cells need that can go on, and the references that judge them."""
        going_on = [progress for progress in self._begun.values() if self._can_go_on(progress)]
        if not going_on:
            return
        needed = {progress.cell.service.name for progress in going_on}
        needed |= {service.name for service in self._plan.services if service.arm is Arm.AR}
        troubles = await self._crew.take_up(stay, needed - self._crew.dead)
        self._stay = stay
        if self._plan.rotation is not None:
            self._out.event("position", position=stay.position, failed=dict(troubles))
        for progress in going_on:
            progress.given_up = troubles.get(progress.cell.service.name)
            if progress.given_up:
                self._out.warning(f"{progress.cell.name}: {progress.given_up}")

    def _can_go_on(self, progress: Progress) -> bool:
        return progress.open and progress.cell.service.name not in self._crew.dead

    async def _run_block(
        self, block: Block, stay: Stay, session: aiohttp.ClientSession, advance: Advance
    ) -> None:
        """The block's load during a stay. After the last one its cells are judged: those whose service died
        under another cell are not, and their rows are kept.
        """
        begun = [self._begun[cell.key] for cell in block.cells if cell.key in self._begun]
        cells = [progress for progress in begun if self._can_go_on(progress)]
        if any(progress.lacks(stay.repeats) for progress in cells):
            await self._load(block, cells, stay, session, advance)
        judged = [progress for progress in begun if progress in cells or not progress.open]
        if stay.last and judged:
            await self._judge_and_seal(block, judged, session)

    async def _load(
        self,
        block: Block,
        cells: Sequence[Progress],
        stay: Stay,
        session: aiohttp.ClientSession,
        advance: Advance,
    ) -> None:
        for progress in cells:
            progress.started = progress.started or self._stamp()
        await self._warm_up(cells, session)
        await self._probe_parity(cells, session)
        before = await self._totals(cells, session)
        if block.concurrency == 1:
            await self._one_by_one(cells, stay, session, advance)
        else:
            await self._closed_loop(cells, stay, block.concurrency, session, advance)
        after = await self._totals(cells, session)
        for progress in cells:
            name = progress.cell.service.name
            if name in before:
                progress.add_totals(growth(before[name], after.get(name)))

    async def _warm_up(self, cells: Sequence[Progress], session: aiohttp.ClientSession) -> None:
        """Requests that are dropped: they pay for first shapes, and their outputs are the parity probe."""
        prompts = self._plan.dataset.prompts
        for progress in cells:
            for number in range(progress.cell.spec.warmup):
                if not progress.open:
                    break
                prompt = prompts[number % len(prompts)]
                row = await self._send(progress, session, prompt, number, 0, 0, max_tokens=WARMUP_TOKENS)
                if row.status is RequestStatus.FAILED:
                    await self._note_failure(progress, f"warm-up: {row.error}", at_once=True)
                if number == 0:
                    progress.warm_output = row.output_ids

    async def _probe_parity(self, cells: Sequence[Progress], session: aiohttp.ClientSession) -> None:
        """Give up before any timing on an arm whose very first tokens are not the target's."""
        reference = next((one for one in cells if one.cell.spec.arm is Arm.AR and one.open), None)
        if reference is None or not reference.warm_output or reference.cell.spec.temperature > 0:
            return
        prompt = self._plan.dataset.prompts[0]
        for progress in cells:
            if not progress.warm_output or not progress.cell.spec.arm.lossless:
                continue
            difference = first_difference(prompt.id, progress.warm_output, reference.warm_output)
            if difference is None:
                continue
            probe = self._target_probe(session, progress.cell)
            gap = await probe.gap(difference) if probe else None
            if gap is not None and gap.parity is ParityClass.DIFFERENT:
                progress.invalid = (
                    f"parity probe: {prompt.id}: output token {difference.index} is {difference.token}, "
                    f"ar gives {difference.reference_token}; "
                    f"gap {gap.gap:.2g}, near-ties end at {gap.threshold:.2g}"
                )
                self._out.warning(f"{progress.cell.name}: {progress.invalid}")

    async def _one_by_one(
        self, cells: Sequence[Progress], stay: Stay, session: aiohttp.ClientSession, advance: Advance
    ) -> None:
        prompts = self._plan.dataset.prompts
        for round_, repeat, index in prompt_rounds(len(prompts), stay.repeats):
            rows: list[tuple[Progress, RequestRow]] = []
            for progress in rotated(cells, round_):
                if not progress.open or progress.done(repeat, index):
                    continue
                await self._flush(progress, session)
                row = await self._send(progress, session, prompts[index], index, repeat, round_)
                rows.append((progress, row))
                advance(1, progress.cell.name)
            for progress, row in rows:
                self._keep(progress, [row])

    async def _closed_loop(
        self,
        cells: Sequence[Progress],
        stay: Stay,
        concurrency: int,
        session: aiohttp.ClientSession,
        advance: Advance,
    ) -> None:
        prompts = self._plan.dataset.prompts
        for repeat in stay.repeats:
            for progress in rotated(cells, repeat):
                todo = [index for index in range(len(prompts)) if not progress.done(repeat, index)]
                if not progress.open or not todo:
                    continue
                await self._flush(progress, session)
                rows: list[RequestRow] = []

                async def worker(
                    queue: Iterator[int], progress: Progress, rows: list[RequestRow], repeat: int
                ) -> None:
                    for index in queue:
                        if not progress.open:
                            return
                        rows.append(
                            await self._send(progress, session, prompts[index], index, repeat, repeat)
                        )
                        advance(1, progress.cell.name)

                queue = iter(todo)
                await gather_all(
                    worker(queue, progress, rows, repeat) for _ in range(min(concurrency, len(todo)))
                )
                self._keep(progress, sorted(rows, key=lambda row: row.order))

    async def _send(
        self,
        progress: Progress,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        index: int,
        repeat: int,
        round_: int,
        *,
        max_tokens: int | None = None,
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
        answer = await generate(
            session, self._service(progress).url, request, timeout_s=self._plan.sweep.request_timeout_s
        )
        row = make_row(
            answer,
            cell.spec,
            prompt=prompt,
            prompt_index=index,
            repeat=repeat,
            round_=round_,
            order=order,
            position=self._stay.position,
            place=self._crew.place(cell.service.name, self._stay),
        )
        if max_tokens is None:
            if row.status is RequestStatus.FAILED:
                await self._note_failure(progress, row.error or "failed")
            else:
                progress.failures_in_a_row = 0
        return row

    async def _note_failure(self, progress: Progress, error: str, *, at_once: bool = False) -> None:
        """After a failed request: is the service dead, or failing so often that going on is pointless?"""
        progress.failures_in_a_row += 1
        try:
            await require_alive_after_failure(self._service(progress))
        except ServiceDied as death:
            progress.given_up, progress.died = death.message, True
            self._crew.dead.add(progress.cell.service.name)
        else:
            if at_once:
                progress.given_up = error
            elif progress.failures_in_a_row >= GIVE_UP_AFTER:
                progress.given_up = (
                    f"given up after {GIVE_UP_AFTER} failed requests in a row, the last: {error}"
                )
        progress.log = redact_text(self._service(progress).log_tail(LOG_TAIL_LINES))
        if progress.given_up:
            self._out.warning(f"{progress.cell.name}: {progress.given_up}")

    async def _flush(self, progress: Progress, session: aiohttp.ClientSession) -> None:
        """Empty the prefix cache. Whether that worked shows in the requests' cached tokens, which a gate
        reads.
        """
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
            async with session.post(
                f"{self._service(progress).url}/flush_cache?timeout=10", timeout=timeout
            ) as answer:
                await answer.read()

    def _service(self, progress: Progress) -> Service:
        """The cell's service as it runs now: after a move it is another one."""
        return self._crew[progress.cell.service.name]

    def _keep(self, progress: Progress, rows: list[RequestRow]) -> None:
        progress.rows.extend(rows)
        self._store.append_partial(progress.cell.key, rows)

    # Judgement

    async def _judge_and_seal(
        self, block: Block, cells: Sequence[Progress], session: aiohttp.ClientSession
    ) -> None:
        references = self._reference_rows(block, cells)
        complaints = {
            name: await self._complaint(self._crew[name], session)
            for name in {progress.cell.service.name for progress in cells if progress.open}
        }
        for progress in cells:
            parity = await self._parity(progress, references, session)
            name = progress.cell.service.name
            width = self._crew.info.get(name, {}).get("ddtree", {}).get("block") or DEFAULT_BLOCK
            evidence = Evidence(
                progress.cell.spec,
                progress.rows,
                parity,
                references,
                complaints.get(name),
                width,
                progress.totals,
            )
            self._seal(progress, evidence)

    def _reference_rows(self, block: Block, cells: Sequence[Progress]) -> dict[Arm, list[RequestRow]]:
        """Rows of the block's `ar` and `dflash` cells, measured now or sealed before, unless they failed."""
        fresh = {progress.cell.key: progress for progress in cells}
        found: dict[Arm, list[RequestRow]] = {}
        for cell in block.cells:
            if cell.spec.arm not in REFERENCES:
                continue
            if cell.key in fresh:
                if fresh[cell.key].open:
                    found[cell.spec.arm] = fresh[cell.key].rows
            elif cell.key in self._sealed and self._sealed[cell.key].state is CellState.COMPLETE:
                found[cell.spec.arm] = self._store.rows(cell.key)
        return found

    async def _parity(
        self, progress: Progress, references: dict[Arm, list[RequestRow]], session: aiohttp.ClientSession
    ) -> list[Parity]:
        spec = progress.cell.spec
        if spec.temperature > 0 or not progress.open or spec.arm is Arm.AR:
            return []
        probe = self._target_probe(session, progress.cell)
        return [
            await compare(progress.rows, rows, arm, probe)
            for arm, rows in references.items()
            if arm is not spec.arm
        ]

    def _target_probe(self, session: aiohttp.ClientSession, cell: PlannedCell) -> TargetProbe | None:
        """Whom to ask for the target's logits: `ar`, or any lossless arm where there is none (a prefill is a
        prefill).
        """
        order = (Arm.AR, Arm.DFLASH, Arm.SHADOW, Arm.DDTREE)
        living = [service for service in self._crew.living() if service.spec.arm in order]
        if not living:
            return None
        service = min(living, key=lambda one: order.index(one.spec.arm))
        return TargetProbe(
            session, service.url, self._prompts, dtype=cell.spec.dtype, timeout_s=PROBE_TIMEOUT_S
        )

    async def _totals(
        self, cells: Sequence[Progress], session: aiohttp.ClientSession
    ) -> dict[str, dict[str, int] | None]:
        """Totals of the servers that keep some and serve one of these cells only, whose own they then are."""
        names = Counter(progress.cell.service.name for progress in cells)
        alone = [name for name, count in names.items() if count == 1 and self._crew[name].alive()]

        async def read(service: Service) -> dict[str, int] | None:
            async def ask() -> Mapping[str, Any] | None:
                try:
                    info = await _server_info(service, session)
                except (aiohttp.ClientError, TimeoutError, ValueError):
                    return None
                return info if isinstance(info, Mapping) else None

            return await settled_totals(ask)

        return {name: await read(self._crew[name]) for name in alone}

    async def _complaint(self, service: Service, session: aiohttp.ClientSession) -> str | None:
        """What is wrong with a service's arguments after the load; a dead one has its own reason."""
        if not service.alive():
            return None
        try:
            info = await _server_info(service, session)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return f"/server_info could not be read after the load: {error!r}"
        if not isinstance(info, dict):
            return "/server_info was no JSON object after the load"
        return not_as_asked(service.spec, info)

    def _seal(self, progress: Progress, evidence: Evidence) -> None:
        cell = progress.cell
        gates = judge(evidence) if progress.open else []
        state, reason = progress.outcome(gates)
        record = CellRecord(
            key=cell.key,
            spec=cell.spec,
            run_id=self._run_id,
            state=state,
            reason=reason,
            started=progress.started or self._stamp(),
            ended=self._stamp(),
            requests=len(progress.rows),
            failed_requests=len(progress.failures),
            rows_sha256="",
            parity=list(evidence.parity),
            gates=gates,
            server=self._crew.info.get(cell.service.name, {}),
        )
        logs = {f"{cell.service.name}.log": progress.log} if progress.log else {}
        self._sealed[cell.key] = self._store.seal(record, progress.rows, logs)
        self._out.event("cell", name=cell.name, key=cell.key, state=state.value, reason=reason)
        if state is not CellState.COMPLETE:
            self._out.warning(f"{cell.name}: {state.value}: {reason}")

    def _pending(self, cells: Sequence[PlannedCell]) -> list[PlannedCell]:
        return [cell for cell in cells if cell.key not in self._sealed]

    def _stamp(self) -> str:
        return self._now().isoformat(timespec="milliseconds")


async def _server_info(service: Service, session: aiohttp.ClientSession) -> Any:
    """What `/server_info` says now. Raises ClientError, TimeoutError or ValueError where it says nothing."""
    timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
    async with session.get(f"{service.url}/server_info", timeout=timeout) as answer:
        return await answer.json(content_type=None)


def require_good(outcome: SweepOutcome) -> None:
    """Raise JobFailed when a cell failed, is invalid or was not run. `unsafe` counts only when it did not run
    through:
    its wrong output is expected and is no failure.
    """
    lines = [
        f"{cell_name(cell.spec)}: {cell.state.value}: {(cell.reason or '').splitlines()[0]}"
        for cell in outcome.bad
    ]
    lines += [f"{name}: not run, its service had died" for name in outcome.not_run]
    if lines:
        raise JobFailed(
            f"{len(lines)} of {len(outcome.run.cells)} cells are no results\n  " + "\n  ".join(lines),
            remedy="mend the cause, then run the same command with --retry-failed",
        )


def request_seed(seed: int, index: int, repeat: int) -> int:
    """A seed for each request that all arms share, so that the same prompt draws the same numbers."""
    return (seed * 1_000_003 + repeat * 10_007 + index) % 2**31


def _sealed(plan: Plan, store: Store) -> dict[str, CellRecord]:
    found = {cell.key: store.cell(cell.key) for cell in plan.cells}
    return {key: record for key, record in found.items() if record is not None}


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does: services down, finished work kept."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
