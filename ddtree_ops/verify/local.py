"""The CPU engine's arms on this machine, for a kit that has nothing else to examine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddtree_ops.bench.dataset import Dataset
from ddtree_ops.bench.environment import engine_version
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.sweep import ArmChoice, LocalEngine, Sweep
from ddtree_ops.services.argv import find_models, local_services
from ddtree_ops.services.local import LocalLauncher, LocalService
from ddtree_ops.services.readiness import wait_ready
from ddtree_ops.verify.subjects import Address

DEFAULT_ARMS = (Arm.AR, Arm.DFLASH, Arm.DDTREE)
START_TIMEOUT_S = 180.0


@contextmanager
def local_arms(
    arms: Sequence[Arm], engine: LocalEngine, budget: int, dataset: Dataset, logs: Path, out: Output
) -> Iterator[list[Address]]:
    """Start a process for each arm, wait until all are ready, and stop them whatever happens.

    logs  folder for their output
    Raises BadInput, BadEnvironment, and JobFailed when one does not start.
    """
    sweep = Sweep(engine=engine, arms=[ArmChoice(arm=arm) for arm in arms], budgets=[budget])
    specs = local_services(sweep, find_models(engine), engine_version())
    launcher = LocalLauncher(logs)
    services: list[LocalService] = []
    try:
        for spec in specs:
            services.append(launcher.create(spec))
            services[-1].start()
        asyncio.run(_all_ready(services, dataset, out))
        yield [Address(service.spec.arm, service.url) for service in services]
    finally:
        for service in services:
            service.stop()


async def _all_ready(services: Sequence[LocalService], dataset: Dataset, out: Output) -> None:
    golden = dataset.prompts[0].request()
    waiting = [
        asyncio.ensure_future(wait_ready(service, golden, timeout_s=START_TIMEOUT_S, note=out.note))
        for service in services
    ]
    try:
        await asyncio.gather(*waiting)
    finally:
        for one in waiting:
            one.cancel()
