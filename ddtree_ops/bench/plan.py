"""The plan of a sweep: its cells with their keys, the services that they need, what runs interleaved, and how
long.

Pure: files were read and servers asked before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.bench.dataset import Dataset
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import CellSpec
from ddtree_ops.schemas.sweep import ArmChoice, LocalEngine, Sweep
from ddtree_ops.services.argv import choice_builder
from ddtree_ops.services.base import ServiceSpec
from ddtree_ops.services.rotation import Rotation

WARMUP_TOKENS = 16
SERVICE_START_S = 6.0


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the service that serves it, by its first replica."""

    spec: CellSpec
    key: str
    service: ServiceSpec

    @property
    def name(self) -> str:
        """Short and unique within a block: arm, builder where the arm has more than one, budget."""
        return cell_name(self.spec)

    @property
    def requests(self) -> int:
        return self.spec.prompts * self.spec.repeats * self.spec.copies


@dataclass(frozen=True)
class Block:
    """Cells of one load point, which are interleaved and compared with each other."""

    concurrency: int
    temperature: float
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True)
class Plan:
    """services: all replicas of every service, in order.
    rotation: null where every service stays in its place; else each repeat has a position of its own.
    """

    sweep: Sweep
    dataset: Dataset
    services: tuple[ServiceSpec, ...]
    blocks: tuple[Block, ...]
    rotation: Rotation | None = None

    @property
    def cells(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for block in self.blocks for cell in block.cells)


def cell_name(spec: CellSpec) -> str:
    """`ar`, `ddtree 31`, `ddtree 31 spine-first`: a builder other than best-first is named."""
    parts = [spec.arm.value]
    if spec.budget is not None:
        parts.append(str(spec.budget))
    if spec.builder not in {None, Builder.BEST_FIRST}:
        parts.append(str(spec.builder))
    return " ".join(parts)


def make_plan(
    sweep: Sweep,
    dataset: Dataset,
    services: Sequence[ServiceSpec],
    *,
    host_fingerprint: str,
    rotation: Rotation | None = None,
) -> Plan:
    """Lay out the grid arms x budgets x concurrencies x temperatures.

    services  one for each arm and builder, or for each arm and budget where budgets are fixed at start; or
              several of one name, its replicas
    rotation  has as many positions as the sweep has repeats
    Raises BadInput when an arm or a budget has no service, or one that is to serve two cells at once.
    """
    blocks = []
    for concurrency in sweep.concurrencies:
        for temperature in sweep.temperatures:
            cells = tuple(
                _cell(sweep, dataset, replicas, budget, concurrency, temperature, host_fingerprint, rotation)
                for choice in sweep.arms
                for budget in (choice.budgets or sweep.budgets if choice.arm.takes_budget else [None])
                for replicas in [_replicas_for(services, choice.arm, _builder(sweep, choice), budget)]
            )
            cells = _side_by_side(cells) if sweep.side_by_side else cells
            blocks.append(Block(concurrency, temperature, cells))
    used = {cell.service.name for block in blocks for cell in block.cells}
    return Plan(sweep, dataset, tuple(s for s in services if s.name in used), tuple(blocks), rotation)


def eta_seconds(
    plan: Plan,
    sealed: Mapping[str, Any],
    seconds_per_token: Mapping[Arm, float],
    start_s: float = SERVICE_START_S,
) -> float | None:
    """Expected duration of what is not sealed yet; null when the speed of an arm is unknown.

    seconds_per_token  one stream's time for a completion token, by arm
    """
    total, left = 0.0, False
    for block in plan.blocks:
        cells = [cell for cell in block.cells if cell.key not in sealed]
        if any(cell.spec.arm not in seconds_per_token for cell in cells):
            return None
        times = [_seconds(cell, seconds_per_token[cell.spec.arm]) for cell in cells]
        total += max(times, default=0.0) if plan.sweep.side_by_side else sum(times)
        left = left or bool(cells)
    if left and plan.rotation is not None:
        start_s += plan.rotation.move_s * plan.rotation.positions
    return total + (start_s if left else 0.0)


def _seconds(cell: PlannedCell, seconds_per_token: float) -> float:
    warmups = cell.spec.warmup * cell.spec.positions
    requests = cell.requests / cell.spec.copies  # replicas are loaded at the same time
    tokens = requests * cell.spec.max_tokens + warmups * WARMUP_TOKENS
    # A CPU or one GPU stream gains little from concurrency; better late than surprised.
    return tokens * seconds_per_token / math.sqrt(cell.spec.concurrency)


def _builder(sweep: Sweep, choice: ArmChoice) -> Builder | None:
    """The builder that is asked for; null where none is or the running services decide."""
    if isinstance(sweep.engine, LocalEngine):
        return choice_builder(sweep.engine, choice)
    return choice.builder


def _replicas_for(
    services: Sequence[ServiceSpec], arm: Arm, builder: Builder | None, budget: int | None
) -> list[ServiceSpec]:
    """All replicas of the first service that fits."""
    for service in services:
        right_builder = builder is None or service.identity.builder is builder
        if service.arm is arm and right_builder and service.budget in {None, budget}:
            return [other for other in services if other.name == service.name]
    what = arm.value + (f" with budget {budget}" if budget is not None else "")
    raise BadInput(
        f"engine.services: no service for {what}",
        remedy="add it, or leave the arm or budget out of the sweep",
    )


def _cell(
    sweep: Sweep,
    dataset: Dataset,
    replicas: Sequence[ServiceSpec],
    budget: int | None,
    concurrency: int,
    temperature: float,
    host_fingerprint: str,
    rotation: Rotation | None,
) -> PlannedCell:
    service = replicas[0]
    identity = service.identity
    spec = CellSpec(
        arm=service.arm,
        budget=budget,
        builder=identity.builder,
        topk=identity.topk,
        concurrency=concurrency,
        temperature=temperature,
        max_tokens=sweep.max_tokens,
        ignore_eos=sweep.ignore_eos,
        prompts=len(dataset.prompts),
        repeats=sweep.repeats,
        warmup=sweep.warmup,
        seed=sweep.seed,
        dataset_sha256=dataset.sha256,
        model_sha256=identity.model_sha256,
        drafter_sha256=identity.drafter_sha256,
        engine=identity.engine,
        engine_version=identity.engine_version,
        dtype=identity.dtype,
        argv=list(identity.argv),
        image_digest=identity.image_digest,
        host_fingerprint=host_fingerprint,
        rotation=rotation.of(service.name) if rotation else None,
        replicas=_places(replicas, rotates=rotation is not None),
    )
    return PlannedCell(spec, spec.key(), service)


def _side_by_side(cells: Sequence[PlannedCell]) -> tuple[PlannedCell, ...]:
    """The cells of a load point as they are loaded together. Raises BadInput for two of one service."""
    named = [f"{cell.spec.copies} x {cell.name}" for cell in cells]
    first: dict[str, str] = {}
    for cell in cells:
        other = first.setdefault(cell.service.name, cell.name)
        if other != cell.name:
            raise BadInput(
                f"side_by_side: service {cell.service.name} would serve {other} and {cell.name} at once",
                remedy="one budget for each service",
            )
    beside = [sorted([*named[:number], *named[number + 1 :]]) or None for number in range(len(cells))]
    specs = [cell.spec.model_copy(update={"beside": one}) for cell, one in zip(cells, beside, strict=True)]
    return tuple(PlannedCell(spec, spec.key(), cell.service) for spec, cell in zip(specs, cells, strict=True))


def _places(replicas: Sequence[ServiceSpec], *, rotates: bool) -> list[str] | None:
    """Where each replica is; with a rotation its host, since it moves. Null for a single one."""
    if len(replicas) == 1:
        return None
    seats = [one.at for one in replicas if one.at is not None]
    return [seat.host if rotates else seat.place for seat in seats]
