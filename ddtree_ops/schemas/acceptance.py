"""``summary.json`` of an acceptance bundle: what was run on somebody's host, and what came out.

In the bundle, a tar.gz with one folder ``ddtree-acceptance/``::

    summary.json     AcceptanceSummary
    report.html      the short sweep's report
    kernels.json     the kernel table as the benchmark wrote it
    results/         the short sweep's store, readable by ``ddtree compare report``

Strings hold no addresses, host names, folders or secrets. Differences of logits are in logits; shares are of
the range of their row's logits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import Environment, GateStatus, Record

ACCEPTANCE_SCHEMA = 1


class Verdict(StrEnum):
    PASSED = "passed"
    INCOMPLETE = "incomplete"  # nothing failed, but a gate could not be judged
    FAILED = "failed"


class GateId(StrEnum):
    NODE_PATH = "node-path"
    SIBLING_SWAP = "sibling-swap"
    SPINE = "spine"
    KERNEL_COUNTER = "kernel-counter"
    PARITY = "parity"


class SelfCheckFigures(Record):
    """What an engine's start-up self-check found on its own model; see docs/acceptance.md."""

    trees: int | None = None
    nodes: int | None = None
    width: int | None = None
    node_path_max_diff: float | None = None
    relative_to_range: float | None = None
    sibling_leak_max_diff: float | None = None
    sibling_leak_relative: float | None = None
    noise_max_diff: float | None = None
    noise_relative: float | None = None
    tolerance: float | None = None
    dtype: str | None = None
    passed: bool | None = None
    skipped: str | None = None


class GateResult(Record):
    """One gate on one service."""

    id: GateId
    service: str
    status: GateStatus
    value: float | None = None
    limit: float | None = None
    detail: str
    remedy: str
    control: bool = Field(False, description="of the arm 'unsafe', which has to fail: not in the verdict")
    evidence: dict[str, Any] = Field({}, description="figures behind the value")


class ServiceFacts(Record):
    """One service, by what it says of itself."""

    name: str
    arm: Arm
    budget: int | None = Field(description="null where requests carry their own, or the arm takes none")
    builder: Builder | None
    engine: str
    dtype: str
    host: str | None = Field(None, description="'host-1' and so on: the order in cluster.yaml")
    server: dict[str, Any] = Field({}, description="allow-listed fields of /server_info")
    self_check: SelfCheckFigures | None = None
    noise: float | None = Field(
        None, description="largest change of a log-probability between valid executions of one prefix"
    )


class StageStatus(StrEnum):
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


class KernelTarget(Record):
    """A row of the kernel table."""

    id: str
    what: str
    figure: float | None
    target: float
    direction: Literal["min", "max"]
    error: float | None = None
    error_target: float | None = None
    milliseconds: float | None = None
    stock_milliseconds: float | None = None
    floor_milliseconds: float | None = None


class KernelTable(Record):
    status: StageStatus
    reason: str | None = None
    hardware: str | None = None
    versions: dict[str, str | None] = Field({}, description="of torch, triton and their like")
    targets: list[KernelTarget] = Field([], description="none where no table was made")


class SweepResult(Record):
    status: StageStatus
    reason: str | None = None
    run_id: str | None = None
    seconds: float | None = None
    headline: str | None = None
    cells: dict[str, str] = Field({}, description="cell -> complete, failed or invalid")


class HostFacts(Record):
    """An allow-listed part of a host's facts; cards are in the host's order."""

    name: str = Field(description="'host-1' and so on: the order in cluster.yaml")
    facts: dict[str, Any] = Field({}, description="kernel, driver, docker and their like")
    gpus: list[dict[str, Any]] = Field([], description="name, memory, power cap, link; UUIDs are hashed")


class AcceptanceSummary(Record):
    kind: Literal["ddtree-acceptance"] = "ddtree-acceptance"
    schema_version: Literal[1] = 1
    created: str = Field(description="UTC, ISO 8601")
    ddtree_version: str
    verdict: Verdict
    seconds: float
    prompts: int
    max_tokens: int
    dataset: dict[str, Any] = Field(description="name, sha256")
    environment: Environment = Field(description="of the machine that ran the kit")
    hosts: list[HostFacts] = Field([], description="of a cluster.yaml; none for plain addresses")
    services: list[ServiceFacts]
    gates: list[GateResult]
    kernels: KernelTable
    sweep: SweepResult
    files: dict[str, str] = Field({}, description="sha256 of every other file of the bundle")
