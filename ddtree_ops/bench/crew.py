"""The services of a run: started or moved, waited for, known to be dead, stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ddtree_ops.bench.plan import Plan
from ddtree_ops.bench.progress import Stay
from ddtree_ops.errors import DdtreeError
from ddtree_ops.output import Output
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.services.base import Launcher, Service
from ddtree_ops.services.readiness import wait_ready
from ddtree_ops.services.rotation import Mover

T = TypeVar("T")


class Crew:
    """Services by name and number of the replica.

    info  the storable part of `/server_info` by service, as its first replica was when it was ready
    dead  services that ended while they were measured
    """

    def __init__(self, plan: Plan, launcher: Launcher, mover: Mover | None, out: Output) -> None:
        self._plan = plan
        self._launcher = launcher
        self._mover = mover
        self._out = out
        self._services: dict[tuple[str, int], Service] = {}
        self._absent: frozenset[str] = frozenset()
        self.info: dict[str, dict[str, Any]] = {}
        self.dead: set[str] = set()

    def replica(self, name: str, number: int) -> Service:
        return self._services[name, number]

    def replicas(self, name: str) -> list[Service]:
        """All of a service, in order."""
        return [service for (other, _), service in sorted(self._services.items()) if other == name]

    def living(self) -> list[Service]:
        """All replicas of services that can be asked."""
        gone = self.dead | self._absent
        return [one for (name, _), one in self._services.items() if name not in gone and one.alive()]

    async def take_up(self, stay: Stay, needed: Collection[str]) -> Mapping[str, str]:
        """Have the needed services ready for a stay.

        Returns why a service can't be measured, by service: with a rotation one that did not move on fails
        alone. Without one it is all or nothing: raises what :func:`wait_ready` does.
        """
        names = list(dict.fromkeys(spec.name for spec in self._plan.services if spec.name in needed))
        if self._mover is None:
            self._start(names)
            await gather_all(self._ready(name) for name in names)
            return {}
        try:
            moved = await self._move(self._mover, stay)
        except DdtreeError as error:
            moved = dict.fromkeys(names, error.message)
        troubles = {name: why for name, why in moved.items() if name in names}
        checks = await gather_all(self._ready_or_why(name) for name in names if name not in troubles)
        troubles |= {name: why for name, why in checks if why is not None}
        self._absent = frozenset(troubles)
        where = f"position {stay.position + 1}"
        return {name: f"the service did not get to {where}: {why}" for name, why in troubles.items()}

    def at(self, name: str, number: int, stay: Stay) -> ReplicaAt | None:
        """Which replica that is and where it is during a stay; null where its service is a single process."""
        if self._plan.rotation is not None:
            return self._plan.rotation.seats[name][stay.position][number]
        service = self._services[name, number]
        at = service.spec.at
        if at is None or at.endpoint is not None:
            return at
        return at.model_copy(update={"endpoint": urlsplit(service.url).netloc})

    def stop(self) -> None:
        """Stop all at once, so that grace periods do not add up."""
        if not self._services:
            return
        with ThreadPoolExecutor(len(self._services)) as pool:
            list(pool.map(lambda service: service.stop(), self._services.values()))

    async def _move(self, mover: Mover, stay: Stay) -> Mapping[str, str]:
        """A move is made in a thread and never cut short: services that are half moved are no use."""
        if not stay.moves and await asyncio.to_thread(mover.stands_at, stay.position):
            return {}
        self._out.note(f"position {stay.position + 1}: the services move on")
        await asyncio.to_thread(self.stop)
        return await asyncio.to_thread(mover.move, stay.position, self._out)

    def _start(self, names: Iterable[str]) -> None:
        wanted = set(names)
        for spec in self._plan.services:
            if spec.name in wanted:
                self._services[spec.name, spec.number] = self._launcher.create(spec)
                self._services[spec.name, spec.number].start()

    async def _ready(self, name: str) -> None:
        """Wait for all replicas of a service."""
        golden = self._plan.dataset.prompts[0].request()
        timeout_s = self._plan.sweep.start_timeout_s
        infos = await gather_all(
            wait_ready(service, golden, timeout_s=timeout_s, note=self._out.note)
            for service in self.replicas(name)
        )
        self.info[name] = infos[0]

    async def _ready_or_why(self, name: str) -> tuple[str, str | None]:
        try:
            self._start([name])
            await self._ready(name)
        except DdtreeError as error:
            return name, error.message
        return name, None


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of concurrent work; the first error cancels the rest and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
