"""Back to the container that was replaced, service by service. Rolling back twice returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddtree_ops.containers.connection import DockerFailure
from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.found import Found
from ddtree_ops.deploy.layout import Replica, services_on
from ddtree_ops.deploy.ready import wait_for
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import previous_name
from ddtree_ops.errors import JobFailed
from ddtree_ops.output import Output

#: A container's name while two swap theirs.
ASIDE = ".aside"


@dataclass
class RollbackReport:
    """`without`: replicas that have no previous container and were left as they are."""

    swapped: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    logs: list[Path] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.failed and not self.unreachable

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.good, **vars(self), "logs": [str(file) for file in self.logs]}


def roll_back(session: ClusterSession, out: Output, *, services: Sequence[str] = ()) -> RollbackReport:
    """Swap current and previous containers of the services (none: of all that have a previous one).

    A previous container that does not serve is swapped back. Raises JobFailed when there is none at all.
    """
    session.require_services(services)
    report = RollbackReport()
    swapped = session.each(lambda host: _swap_host(session, host, services, report, out))
    replicas = [replica for host in session.inventory.names for replica in swapped.get(host, ())]
    if not replicas and not report.failed and not session.unreachable:
        raise JobFailed("there is no previous container to go back to")
    for bad in wait_for(session, replicas, note=out.note, as_asked=False):
        host, name = bad.replica.host, bad.replica.container(session.cluster.name)
        if bad.unreachable:
            session.unreachable[host] = bad.message
            continue
        report.failed[f"{host}/{name}"] = f"{bad.message}; swapped back"
        report.swapped.remove(f"{host}/{name}")
        engine = session.engine(host)
        report.logs.append(engine.dump_logs(name, session.logs))
        swap(engine, name)
    report.unreachable = dict(session.unreachable)
    return report


def swap(engine: Engine, name: str) -> None:
    """Current and previous container change names, the previous one starts. Goes on where it broke off."""
    current, previous, aside = (engine.find(one) for one in (name, previous_name(name), f"{name}{ASIDE}"))
    if aside is None and current is not None:
        engine.stop(name)
        engine.rename(name, f"{name}{ASIDE}")
    if previous is not None and (aside is None or current is None):
        engine.rename(previous_name(name), name)
    if engine.find(f"{name}{ASIDE}") is not None:
        engine.rename(f"{name}{ASIDE}", previous_name(name))
    engine.start(name)


def _swap_host(
    session: ClusterSession, host: str, services: Sequence[str], report: RollbackReport, out: Output
) -> list[Replica]:
    engine, cluster = session.engine(host), session.cluster
    containers = {one.name: one for one in engine.ours(cluster.name)}
    swapped = []
    for service in services_on(cluster, host):
        if services and service.name not in services:
            continue
        for index, port in enumerate(service.ports):
            replica = Replica(service, host, index, port)
            name = replica.container(cluster.name)
            previous = containers.get(previous_name(name))
            if previous is None and f"{name}{ASIDE}" not in containers:
                report.without.append(f"{host}/{name}")
                continue
            out.note(f"{host}: {name} goes back")
            try:
                swap(engine, name)
            except DockerFailure as failure:
                report.failed[f"{host}/{name}"] = failure.message
                continue
            report.swapped.append(f"{host}/{name}")
            swapped.append(_as_it_was(replica, previous))
    return swapped


def _as_it_was(replica: Replica, found: Found | None) -> Replica:
    """With the port and the address that the container was made with."""
    argv = [str(part) for part in (found.spec or {}).get("argv", ())] if found is not None else []
    given = dict(itertools.pairwise(argv))
    port, bind = given.get("--port", ""), given.get("--host", replica.service.bind)
    service = replica.service.model_copy(update={"bind": bind})
    return replace(replica, service=service, port=int(port) if port.isdigit() else replica.port)
