"""A sweep whose services change places without a cluster: processes of this machine, each start a new one.

A sweep stops its processes before a move and starts others after it, so the mover has only to say where they
are, or why they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ddtree_ops.bench.config import load_sweep
from ddtree_ops.bench.plan import Plan, make_plan
from ddtree_ops.bench.runner import SweepOutcome, run_sweep
from ddtree_ops.bench.store import Store
from ddtree_ops.bench.sweep import prepare
from ddtree_ops.output import Output, OutputMode
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.services.base import Launcher
from ddtree_ops.services.local import LocalLauncher, LocalService
from ddtree_ops.services.rotation import Rotation

HOST = "here"


class ProcessMover:
    """Where services are is what it says.

    troubles  by position: why services do not get there, or what a move raises
    """

    def __init__(
        self, at: int = 0, troubles: Mapping[int, Mapping[str, str] | BaseException] | None = None
    ) -> None:
        self.at = at
        self.moves: list[int] = []
        self._troubles = dict(troubles or {})

    def stands_at(self, position: int) -> bool:
        return self.at == position

    def move(self, position: int, out: Output) -> Mapping[str, str]:
        trouble = self._troubles.get(position, {})
        if isinstance(trouble, BaseException):
            raise trouble
        self.moves.append(position)
        self.at = position
        return trouble


class Starts:
    """A launcher that remembers what it made, in order."""

    def __init__(self, folder: Path) -> None:
        self._launcher = LocalLauncher(folder)
        self.made: list[LocalService] = []

    def __call__(self, run_id: str) -> Launcher:
        return self

    def create(self, spec: object) -> LocalService:
        self.made.append(self._launcher.create(spec))  # type: ignore[arg-type]
        return self.made[-1]

    def pids(self, name: str) -> list[int]:
        return [one.pid for one in self.made if one.spec.name == name and one.pid is not None]


def rotating_plan(file: Path, cards: Sequence[str] = ("card-0", "card-1", "card-2")) -> Plan:
    """The plan of a sweep.yaml over local processes, with a position for each of its repeats."""
    sweep = load_sweep(file, {})
    with prepare(sweep) as prepared:
        plan, host = prepared.plan, prepared.environment.host_fingerprint
    seats = {
        service.name: tuple(
            (ReplicaAt(host=HOST, gpus=[cards[(number + repeat) % len(cards)]]),)
            for repeat in range(sweep.repeats)
        )
        for number, service in enumerate(plan.services)
    }
    rotation = Rotation(seats, move_s=5.0)
    return make_plan(sweep, plan.dataset, plan.services, host_fingerprint=host, rotation=rotation)


class Rotator:
    """Runs such a plan into a store."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.file = file
        self._folder = folder
        self.starts = Starts(folder / "logs")

    @property
    def store(self) -> Store:
        return Store.create_or_open(
            self._folder / "results", now=datetime.now(UTC).isoformat(timespec="seconds")
        )

    def __call__(self, mover: ProcessMover, *, retry_failed: bool = False) -> SweepOutcome:
        self.starts = Starts(self._folder / "logs")
        with prepare(load_sweep(self.file, {})) as prepared:
            environment = prepared.environment
        out = Output(OutputMode.QUIET)
        plan = rotating_plan(self.file)
        return run_sweep(
            plan, self.store, self.starts, environment, out, mover=mover, retry_failed=retry_failed
        )
