"""A sweep from its description to its sealed cells: the one entry for `bench sweep`, `bench run` and
`quickstart`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Self

from ddtree_ops.bench.dataset import Dataset, load_dataset
from ddtree_ops.bench.environment import capture_environment, engine_version
from ddtree_ops.bench.plan import Plan, eta_seconds, make_plan
from ddtree_ops.bench.runner import SweepOutcome, run_sweep
from ddtree_ops.bench.store import Store
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellRecord, Environment, RequestStatus
from ddtree_ops.schemas.sweep import ClusterEngine, LocalEngine, Sweep
from ddtree_ops.services.argv import find_models, local_services
from ddtree_ops.services.base import Launcher, ServiceSpec
from ddtree_ops.services.cards import CardSampler
from ddtree_ops.services.discover import external_services
from ddtree_ops.services.external import ExternalLauncher
from ddtree_ops.services.local import LocalLauncher
from ddtree_ops.services.rotation import Mover, Rotation, short_place, short_places

#: Seconds per token of the shipped pair on one core of a laptop, for a first guess.
LOCAL_SECONDS_PER_TOKEN = {
    Arm.AR: 0.016,
    Arm.DFLASH: 0.016,
    Arm.SHADOW: 0.016,
    Arm.DDTREE: 0.015,
    Arm.UNSAFE: 0.028,
}


@dataclass(frozen=True)
class Attached:
    """Services of a cluster that a sweep holds on to.

    sweep        with the cluster's arms where it named none
    fingerprint  of the hosts and cards that serve
    close        lets go of the hosts; the services stay as they are
    cards        looks at the GPUs of the services; null where none is known
    rotation     where services will be, and `mover` what brings them there; null where they stay
    """

    sweep: Sweep
    services: list[ServiceSpec]
    launcher: Launcher
    fingerprint: str
    close: Callable[[], None]
    rotation: Rotation | None = None
    mover: Mover | None = None
    cards: CardSampler | None = None


@dataclass(frozen=True)
class Prepared:
    """A sweep that could start: its plan, and the machine that it is planned for. Close it afterwards."""

    plan: Plan
    environment: Environment
    attached: Attached | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.attached is not None:
            self.attached.close()


def prepare(sweep: Sweep, note: Callable[[str], None] = lambda text: None) -> Prepared:
    """Read prompts, hash models, ask running servers, lay out the cells. Starts nothing.

    note  gets a line when a host of a cluster is out of reach, also later

    Raises BadInput, BadEnvironment.
    """
    dataset = load_dataset(sweep.dataset, sweep.prompts)
    environment = capture_environment()
    if isinstance(sweep.engine, ClusterEngine):
        return _prepare_on_cluster(sweep, sweep.engine, dataset, environment, note)
    if isinstance(sweep.engine, LocalEngine):
        services = local_services(sweep, find_models(sweep.engine), engine_version())
    else:
        services = external_services(sweep.engine)
    plan = make_plan(sweep, dataset, services, host_fingerprint=environment.host_fingerprint)
    return Prepared(plan, environment)


def _prepare_on_cluster(
    sweep: Sweep,
    engine: ClusterEngine,
    dataset: Dataset,
    environment: Environment,
    note: Callable[[str], None],
) -> Prepared:
    from ddtree_ops.deploy.sweep import attach  # ansible and docker are for operators only

    attached = attach(sweep, engine, note=note)
    try:
        environment = environment.model_copy(update={"host_fingerprint": attached.fingerprint})
        plan = make_plan(
            attached.sweep,
            dataset,
            attached.services,
            host_fingerprint=attached.fingerprint,
            rotation=attached.rotation,
        )
    except BaseException:
        attached.close()
        raise
    return Prepared(plan, environment, attached)


def execute(
    prepared: Prepared, results: Path, out: Output, *, retry_failed: bool = False
) -> tuple[Store, SweepOutcome]:
    """Run what is not sealed yet in the store at `results`. Raises as `Store` and `run_sweep` do."""
    store = Store.create_or_open(results, now=datetime.now(UTC).isoformat(timespec="seconds"))

    def launcher(run_id: str) -> Launcher:
        if prepared.attached is not None:
            return prepared.attached.launcher
        if isinstance(prepared.plan.sweep.engine, LocalEngine):
            return LocalLauncher(store.run_folder(run_id) / "logs")
        return ExternalLauncher()

    outcome = run_sweep(
        prepared.plan,
        store,
        launcher,
        prepared.environment,
        out,
        mover=prepared.attached.mover if prepared.attached else None,
        cards=prepared.attached.cards if prepared.attached else None,
        retry_failed=retry_failed,
    )
    return store, outcome


def describe(prepared: Prepared, results: Path) -> dict[str, Any]:
    """The plan as data: cells with key and state, the services' argv, and the ETA of what is left."""
    plan = prepared.plan
    store = Store.open(results) if (results / "store.json").is_file() else None
    sealed = {cell.key: found for cell in plan.cells if store and (found := store.cell(cell.key))}
    eta = eta_seconds(plan, sealed, _speeds(plan, store, sealed))
    return {
        "name": plan.sweep.name,
        "dataset": {
            "name": plan.dataset.name,
            "sha256": plan.dataset.sha256,
            "prompts": len(plan.dataset.prompts),
        },
        "services": [
            {
                "name": service.name,
                "replica": service.number,
                "place": service.at.place if service.at else None,
                "url": service.url,
                "argv": list(service.argv),
            }
            for service in plan.services
        ],
        "cells": [
            {
                "name": cell.name,
                "key": cell.key,
                "concurrency": cell.spec.concurrency,
                "temperature": cell.spec.temperature,
                "requests": cell.requests,
                "replicas": cell.spec.copies,
                "service": cell.service.name,
                "state": sealed[cell.key].state.value if cell.key in sealed else "planned",
            }
            for cell in plan.cells
        ],
        "rotation": _rotation(plan),
        "eta_seconds": None if eta is None else round(eta, 1),
    }


def show_plan(description: Mapping[str, Any], out: Output) -> None:
    """Print a plan as tables and a line, or as one JSON object."""
    rows = [
        [
            cell["name"],
            cell["concurrency"],
            cell["temperature"],
            cell["requests"],
            cell["state"],
            cell["key"][:16],
        ]
        for cell in description["cells"]
    ]
    out.table("Cells", ["cell", "C", "T", "requests", "state", "key"], rows)
    for service in description["services"]:
        where = f" at {short_place(service['place'])}" if service["place"] else ""
        out.line(f"{service['name']}{where}: {service['url'] or ' '.join(service['argv'])}")
    if rotation := description["rotation"]:
        places = rotation["places"]
        moves = f"{rotation['moves']} moves, each about {rotation['move_seconds']:g} s"
        at = [
            [n + 1, *(short_places(some[n]) for some in places.values())]
            for n in range(rotation["positions"])
        ]
        out.table(f"Positions: {moves}", ["position", *places], at)
    out.result(description, summary=f"{len(rows)} cells, {_about(description['eta_seconds'])}")


def _rotation(plan: Plan) -> dict[str, Any] | None:
    """Positions, how many moves there are between them, where each service is, and what a move may take."""
    if plan.rotation is None:
        return None
    used = {service.name for service in plan.services}
    return {
        "positions": plan.rotation.positions,
        "moves": plan.rotation.positions - 1,
        "places": {name: plan.rotation.places(name) for name in plan.rotation.seats if name in used},
        "move_seconds": plan.rotation.move_s,
    }


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "duration unknown: nothing was measured yet on these services"
    return f"about {timedelta(seconds=round(seconds))} to go"


def _speeds(plan: Plan, store: Store | None, sealed: Mapping[str, CellRecord]) -> dict[Arm, float]:
    """Seconds per token by arm, from sealed cells of the plan where there are some."""
    measured: dict[Arm, list[float]] = defaultdict(list)
    for key, record in sealed.items():
        if store is not None and record.spec.concurrency == 1:
            measured[record.spec.arm] += [
                row.e2e_s / row.completion_tokens
                for row in store.rows(key)
                if row.status is RequestStatus.OK and row.e2e_s and row.completion_tokens
            ]
    speeds = dict(LOCAL_SECONDS_PER_TOKEN) if isinstance(plan.sweep.engine, LocalEngine) else {}
    return speeds | {arm: median(values) for arm, values in measured.items() if values}
