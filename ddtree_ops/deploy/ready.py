"""Whether containers serve what was asked for: alive, `/ready`, `/server_info`, a golden prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddtree_ops.containers.connection import HostUnreachable
from ddtree_ops.containers.service import ContainerService, Place
from ddtree_ops.deploy.layout import Replica
from ddtree_ops.deploy.render import expected_arguments, expected_block
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.errors import DdtreeError
from ddtree_ops.services.base import Identity, ServiceSpec
from ddtree_ops.services.readiness import wait_ready

#: Greedy and short; what it says does not matter, that it says the same twice does.
GOLDEN = {"text": "def add(a, b):\n    return"}

Note = Callable[[str], None]


@dataclass(frozen=True)
class NotServing:
    """Why a replica does not serve. `unreachable`: nothing is known, its host does not answer."""

    replica: Replica
    message: str
    unreachable: bool = False


def wait_for(
    session: ClusterSession,
    replicas: Sequence[Replica],
    *,
    note: Note,
    timeout_s: float | None = None,
    as_asked: bool = True,
) -> list[NotServing]:
    """Wait until all serve, or fail, or the deadline of the phase is over; return those that do not.

    as_asked  compare `/server_info` with cluster.yaml; not so for a container of an older one
    """
    limit = session.cluster.deadlines.ready if timeout_s is None else timeout_s

    async def all_of_them() -> list[NotServing | None]:
        waits = (_wait(session, replica, limit, note, as_asked) for replica in replicas)
        return list(await asyncio.gather(*waits))

    return [one for one in asyncio.run(all_of_them()) if one is not None]


def service_spec(session: ClusterSession, replica: Replica) -> ServiceSpec:
    """The replica as readiness sees it."""
    service, cluster = replica.service, session.cluster
    return ServiceSpec(
        name=replica.name,
        arm=service.arm,
        budget=service.budget,
        identity=Identity(cluster.engine.value, "", "", None, "", service.topk, service.builder, ()),
        expected=expected_block(cluster, service),
        arguments=expected_arguments(cluster, service),
        headers=session.headers,
    )


def container_service(
    session: ClusterSession, replica: Replica, spec: ServiceSpec, *, note: Note, grace_s: float
) -> ContainerService:
    """The replica's container behind the interface of all services."""
    link = session.links[replica.host]
    name = replica.container(session.cluster.name)
    place = Place(link, name, replica.port, replica.service.bind)
    return ContainerService(spec, place, grace_s=grace_s, note=note)


async def _wait(
    session: ClusterSession, replica: Replica, limit: float, note: Note, as_asked: bool
) -> NotServing | None:
    spec = service_spec(session, replica)
    if not as_asked:
        spec = replace(spec, expected={}, arguments={})
    service = container_service(session, replica, spec, note=note, grace_s=limit)
    try:
        await wait_ready(service, GOLDEN, timeout_s=limit, note=note)
    except HostUnreachable as gone:
        return NotServing(replica, gone.message, unreachable=True)
    except DdtreeError as error:
        if not await asyncio.to_thread(session.links[replica.host].alive):
            return NotServing(replica, error.message, unreachable=True)
        return NotServing(replica, error.message)
    return None
