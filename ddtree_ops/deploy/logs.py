"""Logs of a service's containers, also of those that were replaced."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.errors import JobFailed


def log_places(
    session: ClusterSession, service: str, *, replica: int | None, previous: bool
) -> list[tuple[str, str]]:
    """Host and name of each container of the service, or of a gateway, that is there, in any state.

    Raises JobFailed when there is none; hosts without an answer are named.
    """
    if service not in {gateway.name for gateway in session.cluster.gateways}:
        session.require_services([service])
    found = session.each(lambda host: session.engine(host).ours(session.cluster.name))
    places = [
        (host, one.name)
        for host in session.inventory.names
        for one in found.get(host, ())
        if one.service == service
        and one.previous == previous
        and not one.one_shot
        and (replica is None or one.replica == replica)
    ]
    if not places:
        lost = [f"{host} does not answer: {why}" for host, why in session.unreachable.items()]
        what = "no previous container" if previous else "no container"
        raise JobFailed("; ".join([f"{service}: there is {what}", *lost]))
    return places


def log_stream(
    session: ClusterSession, host: str, name: str, *, tail: int | None, follow: bool
) -> Iterator[str]:
    """Lines without their ends, as they come."""
    for line in session.engine(host).logs(name, tail=tail, follow=follow):
        yield line.decode(errors="replace").rstrip("\r\n")
