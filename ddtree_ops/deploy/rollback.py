"""Back to the container that was replaced, of a service or a gateway. Rolling back twice returns."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddtree_ops.containers.connection import DockerFailure, HostUnreachable
from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.found import Found
from ddtree_ops.deploy.layout import Replica, services_on
from ddtree_ops.deploy.ready import wait_for
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import previous_name
from ddtree_ops.errors import JobFailed
from ddtree_ops.gateway.deploy import gateway_container, gateways_on, wait_gateways
from ddtree_ops.output import Output

#: A container's name while two swap theirs.
ASIDE = ".aside"


@dataclass
class RollbackReport:
    """`without`: replicas and gateways that have no previous container and were left as they are."""

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

    services  gateways among them only where they are named: what they lead to comes first
    A previous container that does not serve is swapped back. Raises JobFailed when there is none at all.
    """
    session.require_services(services, gateways=True)
    doors = {gateway.name for gateway in session.cluster.gateways} & set(services)
    report = RollbackReport()
    if not services or set(services) - doors:
        _services_back(session, services, report, out)
    if doors:
        _gateways_back(session, doors, report, out)
    if not report.swapped and not report.failed and not session.unreachable:
        raise JobFailed("there is no previous container to go back to")
    report.unreachable = dict(session.unreachable)
    return report


def _services_back(
    session: ClusterSession, services: Sequence[str], report: RollbackReport, out: Output
) -> None:
    swapped = session.each(lambda host: _swap_host(session, host, services, report, out))
    replicas = [replica for host in session.inventory.names for replica in swapped.get(host, ())]
    for bad in wait_for(session, replicas, note=out.note, as_asked=False):
        host, name = bad.replica.host, bad.replica.container(session.cluster.name)
        if bad.unreachable:
            session.unreachable[host] = bad.message
            continue
        _back_again(session, host, name, bad.message, report)


def _gateways_back(
    session: ClusterSession, doors: Collection[str], report: RollbackReport, out: Output
) -> None:
    """A gateway is asked where it listened then, for the replicas of then that there are still."""

    def work(host: str) -> dict[tuple[str, str], list[str]]:
        here = [gateway for gateway in gateways_on(session, host) if gateway.name in doors]
        found = {}
        for name in (gateway_container(session, gateway) for gateway in here):
            went, previous = _swapped(session, host, name, report, out)
            if went:
                found[host, name] = _argv(previous)
        return found

    for host, made in session.each(work).items():
        try:
            places = {place: argv for place, argv in made.items() if argv}
            for (_, name), why in wait_gateways(session, made, note=out.note, made=places).items():
                _back_again(session, host, name, why, report)
        except HostUnreachable as gone:
            session.unreachable[host] = gone.message


def _back_again(session: ClusterSession, host: str, name: str, why: str, report: RollbackReport) -> None:
    report.failed[f"{host}/{name}"] = f"{why}; swapped back"
    report.swapped.remove(f"{host}/{name}")
    engine = session.engine(host)
    report.logs.append(engine.dump_logs(name, session.logs))
    swap(engine, name)


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
    swapped = []
    for service in services_on(session.cluster, host):
        if services and service.name not in services:
            continue
        for index, port in enumerate(service.ports):
            replica = Replica(service, host, index, port)
            went, previous = _swapped(session, host, replica.container(session.cluster.name), report, out)
            if went:
                swapped.append(_as_it_was(replica, previous))
    return swapped


def _swapped(
    session: ClusterSession, host: str, name: str, report: RollbackReport, out: Output
) -> tuple[bool, Found | None]:
    """Whether it went back, and the container that was the previous one (null: it broke off before)."""
    engine = session.engine(host)
    previous = engine.find(previous_name(name))
    if previous is None and engine.find(f"{name}{ASIDE}") is None:
        report.without.append(f"{host}/{name}")
        return False, None
    out.note(f"{host}: {name} goes back")
    try:
        swap(engine, name)
    except DockerFailure as failure:
        report.failed[f"{host}/{name}"] = failure.message
        return False, None
    report.swapped.append(f"{host}/{name}")
    return True, previous


def _as_it_was(replica: Replica, found: Found | None) -> Replica:
    """With the port and the address that the container was made with."""
    given = dict(itertools.pairwise(_argv(found)))
    port, bind = given.get("--port", ""), given.get("--host", replica.service.bind)
    service = replica.service.model_copy(update={"bind": bind})
    return replace(replica, service=service, port=int(port) if port.isdigit() else replica.port)


def _argv(found: Found | None) -> list[str]:
    return [] if found is None else [str(part) for part in (found.spec or {}).get("argv", ())]
