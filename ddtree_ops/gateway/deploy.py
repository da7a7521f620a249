"""Gateways in the life of a cluster: what is to be done to them, whether they serve, how they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from ddtree_ops.containers.connection import HostUnreachable
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.deploy.ready import GOLDEN
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import Action, Step, container_step, spec_diff
from ddtree_ops.errors import DdtreeError
from ddtree_ops.gateway.check import GatewayNotReady, GatewayState, gateway_state, wait_gateway
from ddtree_ops.gateway.render import Worker, as_made, home_of, render_gateway, workers_of
from ddtree_ops.redact import redact_text
from ddtree_ops.schemas.gateway import Gateway

UNKNOWN, MISSING = "unknown", "missing"
LOG_LINES = 20

Note = Callable[[str], None]


def gateways_on(session: ClusterSession, host: str, services: Sequence[str] = ()) -> list[Gateway]:
    """The gateways that live on the host; with `services`, only those in front of these."""
    return [
        gateway
        for gateway in session.cluster.gateways
        if home_of(session.cluster, gateway, session.whole) == host
        and (not services or gateway.service in services)
    ]


def gateway_hosts(session: ClusterSession, services: Sequence[str] = ()) -> list[str]:
    """The reachable hosts that have a gateway."""
    return [host for host in session.hosts if gateways_on(session, host, services)]


def gateway_specs(
    session: ClusterSession, images: Mapping[str, str], services: Sequence[str] = ()
) -> list[tuple[str, ContainerSpec]]:
    """Every gateway's host and container. `images`: ids by host, of hosts that have one."""
    return [
        (host, render_gateway(session.cluster, gateway, session.whole, images[host]))
        for host in images
        for gateway in gateways_on(session, host, services)
    ]


def gateway_steps(
    session: ClusterSession,
    host: str,
    images: Mapping[str, str],
    *,
    services: Sequence[str] = (),
    recreate: bool = False,
) -> list[Step]:
    """What has to be done on a host, also to a gateway that has moved away. Raises HostUnreachable."""
    found = session.engine(host).ours(session.cluster.name)
    there = {one.name: one for one in found if not one.previous and not one.one_shot}
    here = {gateway.name for gateway in gateways_on(session, host)}
    moved = {gateway.name for gateway in session.cluster.gateways} - here
    steps = [
        Step(host, one.name, Action.REMOVE, f"the gateway {one.service} is on another host now")
        for one in there.values()
        if one.service in moved
    ]
    specs = [spec for at, spec in gateway_specs(session, images, services) if at == host]
    return steps + [container_step(host, None, spec, there.get(spec.name), recreate) for spec in specs]


def wait_gateways(
    session: ClusterSession,
    places: Iterable[tuple[str, str]],
    *,
    note: Note,
    timeout_s: float | None = None,
    made: Mapping[tuple[str, str], Sequence[str]] = MappingProxyType({}),
) -> dict[tuple[str, str], str]:
    """Wait for gateways by (host, container); return why for those that do not serve.

    made  the options of containers that an older cluster.yaml made
    Replicas on hosts that are not worked on, or that cluster.yaml no longer has, are not waited for. Raises
    HostUnreachable.
    """
    bad = {}
    limit = session.cluster.deadlines.ready if timeout_s is None else timeout_s
    for host, name in places:
        gateway = _by_container(session, name)
        workers = workers_of(session.cluster, gateway, session.whole)
        near = [worker for worker in workers if worker.host in session.hosts]
        expected = [worker.url for worker in workers]
        if (host, name) in made:
            gateway, expected = as_made(gateway, made[host, name])
        waited = {worker.url for worker in near}
        url, metrics = _addresses(session, host, gateway)
        try:
            wait_gateway(
                url,
                metrics,
                expected,
                _direct(session, gateway, near) or url,
                GOLDEN,
                headers=session.headers,
                tolerated=[one for one in expected if one not in waited],
                timeout_s=limit,
                require_alive=partial(_require_running, session, host, name),
                note=note,
            )
        except HostUnreachable:
            raise
        except DdtreeError as error:
            bad[host, name] = error.message
    return bad


@dataclass(frozen=True)
class GatewayStatus:
    """A gateway as it stands.

    state    of its container; `missing` for none, `unknown` where its host does not answer
    serving  null where it could not be asked
    reason   why it is not as it should be; empty where it is
    """

    host: str
    name: str
    container: str
    service: str
    state: str
    serving: GatewayState | None = None
    reason: str = ""
    drift: tuple[str, ...] = ()
    url: str | None = None

    @property
    def good(self) -> bool:
        return not self.reason

    def as_json(self) -> dict[str, Any]:
        workers = () if self.serving is None else self.serving.workers
        return {
            "host": self.host,
            "name": self.name,
            "container": self.container,
            "service": self.service,
            "state": self.state,
            "ok": self.good,
            "reason": self.reason,
            "drift": list(self.drift),
            "url": self.url,
            "workers": [{**vars(worker), "usable": worker.usable} for worker in workers],
        }


def look_at_gateways(session: ClusterSession, services: Sequence[str] = ()) -> list[GatewayStatus]:
    """Every gateway of the hosts that are worked on. Changes nothing."""
    looks = session.each(lambda host: _look(session, host, services), gateway_hosts(session, services))
    found = [one for host in session.inventory.names for one in looks.get(host, ())]
    for host, why in session.unreachable.items():
        found += [
            _status(session, host, gateway, UNKNOWN, why) for gateway in gateways_on(session, host, services)
        ]
    return found


def _look(session: ClusterSession, host: str, services: Sequence[str]) -> list[GatewayStatus]:
    return [_look_at(session, host, gateway) for gateway in gateways_on(session, host, services)]


def _look_at(session: ClusterSession, host: str, gateway: Gateway) -> GatewayStatus:
    found = session.engine(host).find(gateway_container(session, gateway))
    if found is None:
        return _status(session, host, gateway, MISSING, "there is no container")
    if not found.running:
        return _status(session, host, gateway, found.state, found.outcome)
    # A newer image is the business of `up`, not a drift.
    spec = render_gateway(session.cluster, gateway, session.whole, found.image)
    drift = spec_diff(found.spec, spec) if found.config_hash != spec.config_hash else ()
    workers = workers_of(session.cluster, gateway, session.whole)
    url, metrics = _addresses(session, host, gateway)
    serving = gateway_state(url, metrics, [worker.url for worker in workers])
    reason = "differs from cluster.yaml" if drift else "; ".join(serving.problems)
    return GatewayStatus(
        host, gateway.name, spec.name, gateway.service, found.state, serving, reason, drift, url
    )


def _status(session: ClusterSession, host: str, gateway: Gateway, state: str, reason: str) -> GatewayStatus:
    return GatewayStatus(
        host, gateway.name, gateway_container(session, gateway), gateway.service, state, reason=reason
    )


def gateway_container(session: ClusterSession, gateway: Gateway) -> str:
    """The name of its container."""
    return f"{session.cluster.name}-{gateway.name}-0"


def _by_container(session: ClusterSession, name: str) -> Gateway:
    return next(one for one in session.cluster.gateways if gateway_container(session, one) == name)


def _addresses(session: ClusterSession, host: str, gateway: Gateway) -> tuple[str, str]:
    """Its base address and that of its metrics, on this machine."""
    link = session.links[host]
    return link.forward(gateway.bind, gateway.port), link.forward(gateway.metrics_bind, gateway.metrics_port)


def _direct(session: ClusterSession, gateway: Gateway, workers: Sequence[Worker]) -> str | None:
    """A replica's base address on this machine; null where none is on a host that is worked on."""
    service = next(one for one in session.cluster.services if one.name == gateway.service)
    return session.links[workers[0].host].forward(service.bind, workers[0].port) if workers else None


def _require_running(session: ClusterSession, host: str, name: str) -> None:
    engine = session.engine(host)
    found = engine.find(name)
    if found is None or not found.running:
        how = "is gone" if found is None else found.outcome
        tail = b"" if found is None else b"".join(engine.logs(name, tail=LOG_LINES))
        log = redact_text(tail.decode(errors="replace"))
        raise GatewayNotReady(
            f"gateway {name} on {host} {how}" + (f"; the end of its log:\n{log}" if log else "")
        )
