"""Runs a plan: services up, ready, probed, warmed, loaded in turns; cells judged and sealed; services down.

One sweep is one pass through :meth:`SweepRunner.run`. Whatever ends it, services are stopped and what was
finished is kept: sealed cells, and the rounds of cells that are not sealed yet.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import aiohttp

from ddtree_ops.bench.client import new_session
from ddtree_ops.bench.crew import Crew
from ddtree_ops.bench.gates import DEFAULT_BLOCK, Evidence, Uses, judge
from ddtree_ops.bench.load import Loader, server_info, target_probe
from ddtree_ops.bench.parity import compare
from ddtree_ops.bench.plan import Block, Plan, PlannedCell, cell_name
from ddtree_ops.bench.progress import Progress, Stay, stays
from ddtree_ops.bench.store import Store
from ddtree_ops.errors import Interrupted, JobFailed
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import (
    CellRecord,
    CellState,
    Environment,
    Parity,
    RequestRow,
    RunRecord,
)
from ddtree_ops.services.base import Launcher, Service
from ddtree_ops.services.cards import CardSampler, card_uses
from ddtree_ops.services.readiness import not_as_asked
from ddtree_ops.services.rotation import Mover

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
    cards: CardSampler | None = None,
    retry_failed: bool = False,
) -> SweepOutcome:
    """Measure what is not sealed yet and seal it.

    launcher_for   run id -> launcher, so that logs lie with their run
    mover          for a plan with a rotation
    cards          looks at the services' GPUs while they are loaded
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
        runner = SweepRunner(plan, store, launcher_for, environment, out, sealed, mover=mover, cards=cards)
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
        cards: CardSampler | None = None,
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
        self._cards = cards
        self._begun: dict[str, Progress] = {}

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
                if self._cards is not None:
                    self._cards.start()
                await self._measure()
        finally:
            if self._cards is not None:
                self._cards.stop()
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
        order = max((row.order + 1 for row in kept), default=0)
        left = stays(self._plan, self._begun.values())
        await self._take_up(left[0])
        most = sum(max(block.concurrency for block in self._plan.blocks) for _ in self._plan.services)
        headers = {name: text for spec in self._plan.services for name, text in spec.headers.items()}
        async with new_session(most, headers) as session:
            with self._out.progress("requests", sum(cell.requests for cell in pending)) as advance:
                loader = Loader(
                    self._plan,
                    self._crew,
                    self._store,
                    self._out,
                    session,
                    advance,
                    order=order,
                    stamp=self._stamp,
                )
                if kept:
                    advance(len(kept), "kept from the interrupted run")
                for stay in left:
                    if stay is not left[0]:
                        await self._take_up(stay)
                    for block in self._plan.blocks:
                        await self._run_block(block, stay, session, loader)

    async def _take_up(self, stay: Stay) -> None:
        """Have what the cells need that can go on, and the references that judge them."""
        going_on = [progress for progress in self._begun.values() if self._can_go_on(progress)]
        if not going_on:
            return
        needed = {progress.cell.service.name for progress in going_on}
        needed |= {service.name for service in self._plan.services if service.arm is Arm.AR}
        if self._plan.sweep.side_by_side:
            needed = {service.name for service in self._plan.services}
        troubles = await self._crew.take_up(stay, needed - self._crew.dead)
        if self._plan.rotation is not None:
            self._out.event("position", position=stay.position, failed=dict(troubles))
        for progress in going_on:
            progress.given_up = troubles.get(progress.cell.service.name)
            if progress.given_up:
                self._out.warning(f"{progress.cell.name}: {progress.given_up}")

    def _can_go_on(self, progress: Progress) -> bool:
        return progress.open and progress.cell.service.name not in self._crew.dead

    async def _run_block(
        self, block: Block, stay: Stay, session: aiohttp.ClientSession, loader: Loader
    ) -> None:
        """The block's load during a stay. After the last one its cells are judged: those whose service died
        under another cell are not, and their rows are kept.
        """
        begun = [self._begun[cell.key] for cell in block.cells if cell.key in self._begun]
        cells = [progress for progress in begun if self._can_go_on(progress)]
        if any(progress.lacks(stay.repeats) for progress in cells):
            company = self._company(block, cells)
            cells = [progress for progress in cells if progress.open]
            await loader.load(block, cells, stay, company)
        judged = [progress for progress in begun if progress in cells or not progress.open]
        if stay.last and judged:
            await self._judge_and_seal(block, judged, session)

    def _company(self, block: Block, cells: Sequence[Progress]) -> list[Progress]:
        """With services side by side: the block's sealed cells, to be loaded along with those that are not.

        Where one can't be loaded, the others can't be measured beside it, and are given up.
        """
        if not self._plan.sweep.side_by_side:
            return []
        mine = {progress.cell.key for progress in cells}
        others = [cell for cell in block.cells if cell.key not in mine]
        serving = {service.spec.name for service in self._crew.living()}
        if absent := [cell.name for cell in others if cell.service.name not in serving]:
            for progress in cells:
                progress.given_up = f"it was to be loaded beside {', '.join(absent)}, which does not serve"
                self._out.warning(f"{progress.cell.name}: {progress.given_up}")
            return []
        return [Progress(cell, []) for cell in others]

    # Judgement

    async def _judge_and_seal(
        self, block: Block, cells: Sequence[Progress], session: aiohttp.ClientSession
    ) -> None:
        references = self._reference_rows(block, cells)
        complaints = {
            name: await self._complaint(self._crew.replicas(name), session)
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
                Uses(*card_uses(progress.rows, self._cards)),
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
        probe = target_probe(self._crew, session, self._plan, progress.cell)
        return [
            await compare(progress.rows, rows, arm, probe)
            for arm, rows in references.items()
            if arm is not spec.arm
        ]

    async def _complaint(self, replicas: Sequence[Service], session: aiohttp.ClientSession) -> str | None:
        """What is wrong with the replicas' arguments after the load; a dead one has its own reason."""
        for service in replicas:
            complaint = await _complaint(service, session) if service.alive() else None
            if complaint:
                return complaint if len(replicas) == 1 else f"{service.spec.label}: {complaint}"
        return None

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
            cards=evidence.cards.found,
            cards_missing=evidence.cards.missing,
        )
        logs = {f"{name}.log": text for name, text in progress.logs.items() if text}
        self._sealed[cell.key] = self._store.seal(record, progress.rows, logs)
        self._out.event("cell", name=cell.name, key=cell.key, state=state.value, reason=reason)
        if state is not CellState.COMPLETE:
            self._out.warning(f"{cell.name}: {state.value}: {reason}")

    def _pending(self, cells: Sequence[PlannedCell]) -> list[PlannedCell]:
        return [cell for cell in cells if cell.key not in self._sealed]

    def _stamp(self) -> str:
        return self._now().isoformat(timespec="milliseconds")


async def _complaint(service: Service, session: aiohttp.ClientSession) -> str | None:
    try:
        info = await server_info(service, session)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return f"/server_info could not be read after the load: {error!r}"
    if not isinstance(info, dict):
        return "/server_info was no JSON object after the load"
    return not_as_asked(service.spec, info)


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
