"""Take a cluster down and prove it: no container, no port, no GPU memory is left in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ddtree_ops.containers.connection import DockerFailure
from ddtree_ops.containers.found import Found
from ddtree_ops.deploy.layout import services_on
from ddtree_ops.deploy.render import loopback
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.gateway.deploy import gateways_on
from ddtree_ops.hosts.facts import HostFacts
from ddtree_ops.images.build import remove_images
from ddtree_ops.output import Output
from ddtree_ops.schemas.cluster import EngineKind

#: What an idle card may hold, in MiB: the driver's own share.
IDLE_MIB = 1024
PROBE_S = 3.0
LOOK_AGAIN_S = 5.0


@dataclass
class DownReport:
    """`left` says what is still there, by host; `unreachable` hosts were left alone."""

    removed: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.left and not self.unreachable

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.good, **vars(self), "logs": [str(file) for file in self.logs]}


def take_down(
    session: ClusterSession, out: Output, *, services: Sequence[str] = (), purge: bool = False
) -> DownReport:
    """Stop gracefully, keep logs, remove; then look again.

    services  the only ones, with the gateways in front of them; empty for everything of the cluster
    purge     images that ddtree built for the cluster and its volumes, too
    """
    session.require_services(services)
    report = DownReport()
    session.each(lambda host: _remove(session, host, services, report, out))
    if purge and not services:
        session.each(lambda host: _purge(session, host, report, out))
    _prove(session, services, report, out)
    report.unreachable = dict(session.unreachable)
    return report


def _remove(
    session: ClusterSession, host: str, services: Sequence[str], report: DownReport, out: Output
) -> None:
    engine = session.engine(host)
    found = _containers(session, host, services)
    for one in found:
        try:
            if one.running:
                out.note(f"{host}: stopping {one.name}")
                engine.stop(one.name)
            log = engine.remove(one.name, log_folder=session.logs)
        except DockerFailure as failure:
            _left(report, host, failure.message)
            continue
        report.removed.append(f"{host}/{one.name}")
        if log is not None:
            report.logs.append(log)


def _purge(session: ClusterSession, host: str, report: DownReport, out: Output) -> None:
    engine, cluster = session.engine(host), session.cluster
    try:
        for volume in engine.our_volumes(cluster.name):
            engine.remove_volume(volume.name)
            report.volumes.append(f"{host}/{volume.name}")
    except DockerFailure as failure:
        _left(report, host, failure.message)
    out.note(f"{host}: removing images")
    try:
        report.images += [
            f"{host}/{tag}" for tag in remove_images(cluster.name, {host: session.links[host]})[host]
        ]
    except DockerFailure as failure:
        _left(report, host, failure.message)


def _prove(
    session: ClusterSession,
    services: Sequence[str],
    report: DownReport,
    out: Output,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Containers, ports and GPU memory as they are now. With cards, facts are read anew for that."""
    for host, found in session.each(lambda host: _containers(session, host, services)).items():
        for one in found:
            _left(report, host, f"the container {one.name} is still there ({one.outcome})")
    for host, ports in session.each(lambda host: _open_ports(session, host, services)).items():
        for port in ports:
            _left(report, host, f"something still answers on port {port}")
    if session.cluster.engine is EngineKind.SGLANG and session.hosts and not services:
        for host, lines in _busy(session, out, clock, sleep).items():
            for line in lines:
                _left(report, host, line)


def _busy(
    session: ClusterSession, out: Output, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, list[str]]:
    """Cards that stay busy until the deadline, in words, by host: the driver frees memory when it likes."""
    deadline = clock() + session.cluster.deadlines.stop
    while True:
        out.note("looking at the cards")
        busy = {host: busy_cards(facts) for host, facts in session.facts().items()}
        busy = {host: lines for host, lines in busy.items() if lines}
        if not busy or clock() >= deadline:
            return busy
        sleep(LOOK_AGAIN_S)


def busy_cards(facts: HostFacts) -> list[str]:
    """Cards that are not idle, in words."""
    return [
        f"GPU {gpu.index} holds {gpu.used} MiB"
        + (f" (processes {', '.join(map(str, gpu.processes))})" if gpu.processes else "")
        for gpu in facts.gpus
        if (gpu.used or 0) > IDLE_MIB or gpu.processes
    ]


def _containers(session: ClusterSession, host: str, services: Sequence[str]) -> list[Found]:
    """Previous ones included; a gateway goes first, so that nobody is led to what stops."""
    doors = {gateway.name for gateway in gateways_on(session, host, services)}
    found = session.engine(host).ours(session.cluster.name)
    wanted = [one for one in found if not services or one.service in services or one.service in doors]
    return sorted(wanted, key=lambda one: one.service not in doors)


def _open_ports(session: ClusterSession, host: str, services: Sequence[str]) -> list[int]:
    """Ports of services on which anything still speaks HTTP."""
    found = []
    for service in services_on(session.cluster, host):
        if services and service.name not in services:
            continue
        for port in service.ports:
            url = session.links[host].forward(loopback(service.bind), port)
            try:
                httpx.get(f"{url}/ready", timeout=PROBE_S, trust_env=False)
            except httpx.HTTPError:
                continue
            found.append(port)
    for gateway in gateways_on(session, host, services):
        url = session.links[host].forward(gateway.bind, gateway.port)
        with suppress(httpx.HTTPError):
            httpx.get(f"{url}/health", timeout=PROBE_S, trust_env=False)
            found.append(gateway.port)
    return found


def _left(report: DownReport, host: str, what: str) -> None:
    report.left.setdefault(host, []).append(what)
