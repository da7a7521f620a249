"""What runs, and whether it is what cluster.yaml says. A host without an answer is unknown, not down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx

from ddtree_ops.containers.connection import DockerFailure, HostUnreachable
from ddtree_ops.containers.found import Found
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.deploy.layout import CANNOT_PLACE, Card, Replica, services_on
from ddtree_ops.deploy.plan import steps_on
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import previous_name, spec_diff
from ddtree_ops.errors import DdtreeError
from ddtree_ops.gateway.deploy import GatewayStatus, look_at_gateways

READY_S = 5.0
SMI_S = 20.0
SMI = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class ReplicaStatus:
    """One container as it stands.

    state   the engine's word; `missing` for none, `unknown` where the host does not answer
    reason  why it is not as configured; empty where it is
    drift   what differs from cluster.yaml, in lines
    memory  of its GPUs, MiB used of total; null without GPUs or an answer
    """

    host: str
    service: str
    container: str
    state: str
    health: str | None = None
    ready: bool | None = None
    reason: str = ""
    drift: tuple[str, ...] = ()
    image: str = ""
    uptime_s: float | None = None
    memory: tuple[int, int] | None = None
    url: str | None = None
    previous: bool = False

    @property
    def good(self) -> bool:
        return not self.reason

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "drift": list(self.drift), "ok": self.good}


@dataclass(frozen=True)
class ClusterStatus:
    """`strays`: containers of the cluster that cluster.yaml does not name, as HOST/NAME."""

    replicas: list[ReplicaStatus]
    strays: list[str]
    unreachable: Mapping[str, str]
    gateways: list[GatewayStatus] = field(default_factory=list)

    @property
    def good(self) -> bool:
        good = [one.good for one in self.replicas] + [one.good for one in self.gateways]
        return all(good) and not self.strays

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.good,
            "replicas": [one.as_json() for one in self.replicas],
            "gateways": [one.as_json() for one in self.gateways],
            "strays": self.strays,
            "unreachable": dict(self.unreachable),
        }


def look(
    session: ClusterSession,
    *,
    services: Sequence[str] = (),
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> ClusterStatus:
    """Look at every replica. Changes nothing.

    Cards are those of the last `up`: what runs is compared with what was rendered then.
    """
    session.require_services(services)
    troubles: dict[str, str] = {}
    cards = session.known_cards()

    def work(host: str) -> tuple[list[ReplicaStatus], list[str]]:
        try:
            return _host(session, host, cards, services, now)
        except DockerFailure as failure:
            troubles[host] = failure.message
            return [], []

    looks = session.each(work)
    gateways = look_at_gateways(session, services)
    found = [one for host in session.inventory.names for one in looks.get(host, ([], []))[0]]
    strays = [one for host in session.inventory.names for one in looks.get(host, ([], []))[1]]
    for host, why in {**session.unreachable, **troubles}.items():
        found += [
            ReplicaStatus(
                host, service.name, f"{session.cluster.name}-{service.name}-{index}", UNKNOWN, reason=why
            )
            for service in session.cluster.services
            if (service.hosts is None or host in service.hosts) and (not services or service.name in services)
            for index in range(service.copies)
        ]
    return ClusterStatus(found, strays, dict(session.unreachable), gateways)


def _host(
    session: ClusterSession,
    host: str,
    cards: Mapping[str, Sequence[Card]],
    services: Sequence[str],
    now: Callable[[], datetime],
) -> tuple[list[ReplicaStatus], list[str]]:
    engine, cluster = session.engine(host), session.cluster
    containers = engine.ours(cluster.name)
    by_name = {one.name: one for one in containers}
    image = next((one.image for one in containers if not one.previous), "")
    try:
        steps = steps_on(session, host, cards, {host: image}, services=services)
    except CANNOT_PLACE as few:
        return _not_placed(session, host, by_name, services, few.message, now), []
    replicas = [
        _replica(session, step.replica, _with_image(step.spec, by_name.get(step.name)), by_name, now)
        for step in steps
        if step.replica is not None and step.spec is not None
    ]
    strays = [f"{host}/{step.name}" for step in steps if step.replica is None]
    return replicas, strays


def _not_placed(
    session: ClusterSession,
    host: str,
    containers: Mapping[str, Found],
    services: Sequence[str],
    why: str,
    now: Callable[[], datetime],
) -> list[ReplicaStatus]:
    """What is there on a host that has too few cards: how it should be cannot be said."""
    return [
        _as_it_is(session, Replica(service, host, index, port), containers, now, reason=why)
        for service in services_on(session.cluster, host)
        if not services or service.name in services
        for index, port in enumerate(service.ports)
    ]


def _with_image(spec: ContainerSpec, found: Found | None) -> ContainerSpec:
    """As it would be with the image that runs: a newer image is `up`'s business, not a drift."""
    if found is None:
        return spec
    old, new = spec.image.removeprefix("sha256:")[:12], found.image.removeprefix("sha256:")[:12]
    mounts = tuple(
        replace(mount, source=mount.source.replace(old, new)) if old and "-jit-" in mount.source else mount
        for mount in spec.mounts
    )
    return replace(spec, image=found.image, mounts=mounts)


def _replica(
    session: ClusterSession,
    replica: Replica,
    spec: ContainerSpec,
    containers: Mapping[str, Found],
    now: Callable[[], datetime],
) -> ReplicaStatus:
    found = containers.get(spec.name)
    status = _as_it_is(session, replica, containers, now)
    if found is None:
        return status
    return replace(
        status,
        reason=_reason(found, spec, status.ready),
        drift=spec_diff(found.spec, spec) if found.config_hash != spec.config_hash else (),
        memory=_memory(session, replica) if found.running and spec.gpus else None,
    )


def _as_it_is(
    session: ClusterSession,
    replica: Replica,
    containers: Mapping[str, Found],
    now: Callable[[], datetime],
    *,
    reason: str = "there is no container",
) -> ReplicaStatus:
    """What can be said of a replica without knowing how it should be."""
    name = replica.container(session.cluster.name)
    found = containers.get(name)
    status = ReplicaStatus(
        replica.host,
        replica.service.name,
        name,
        "missing",
        reason=reason,
        previous=previous_name(name) in containers,
    )
    if found is None:
        return status
    return replace(
        status,
        state=found.state,
        health=found.health,
        ready=_ready(session, replica) if found.running else None,
        image=found.image.removeprefix("sha256:")[:12],
        uptime_s=(now() - found.started_at).total_seconds() if found.running and found.started_at else None,
        url=session.url(replica) if found.running else None,
    )


def _reason(found: Found, spec: ContainerSpec, ready: bool | None) -> str:
    if not found.running:
        return found.outcome
    if found.config_hash != spec.config_hash:
        return "differs from cluster.yaml"
    if not ready:
        return (
            "starting: /ready does not answer 200 yet" if found.health == "starting" else "/ready is not 200"
        )
    return "unhealthy" if found.health == "unhealthy" else ""


def _ready(session: ClusterSession, replica: Replica) -> bool:
    try:
        answer = httpx.get(f"{session.url(replica)}/ready", timeout=READY_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _memory(session: ClusterSession, replica: Replica) -> tuple[int, int] | None:
    """Asked inside the container: containers can lose their GPUs while the host still has them."""
    try:
        code, output = session.engine(replica.host).exec(
            replica.container(session.cluster.name), SMI, timeout_s=SMI_S
        )
    except HostUnreachable:
        raise
    except DdtreeError:
        return None
    pairs = re.findall(r"^\s*(\d+)\s*,\s*(\d+)\s*$", output, re.MULTILINE)
    if code != 0 or not pairs:
        return None
    return sum(int(used) for used, _ in pairs), sum(int(total) for _, total in pairs)
