"""The services of a cluster as services of a sweep: asked what they are, watched through their engines.

A service is measured by all its replicas, each asked directly: a sweep compares arms, not load balancers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pydantic import HttpUrl

from ddtree_ops.bench.sweep import Attached
from ddtree_ops.containers.card_watch import CardWatch
from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.found import Found
from ddtree_ops.containers.service import ContainerLauncher, Place
from ddtree_ops.deploy.layout import Replica
from ddtree_ops.deploy.render import expected_arguments, expected_block
from ddtree_ops.deploy.rotation import NO_CONTAINER, ClusterMover, plan_rotation, rotating, seat
from ddtree_ops.deploy.session import ClusterSession, open_cluster
from ddtree_ops.errors import BadEnvironment
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.cluster import EngineKind, Service
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.schemas.sweep import ArmChoice, ClusterEngine, ExternalService, Sweep
from ddtree_ops.services.base import ServiceSpec
from ddtree_ops.services.discover import describe_service, fetch_server_info, require_alike

Note = Callable[[str], None]


@dataclass(frozen=True)
class Serving:
    """A replica that is measured, its container, and where it is.

    number  counts over all replicas of its service, those of other hosts included
    """

    replica: Replica
    found: Found
    at: ReplicaAt


def attach(sweep: Sweep, engine: ClusterEngine, *, note: Note) -> Attached:
    """Connect to the cluster and ask the services of the sweep's arms what they are. Starts nothing.

    Raises BadEnvironment for a service that does not run or a host that does not answer, BadInput for one
    that is not what cluster.yaml says.
    """
    with ExitStack() as stack:
        session = stack.enter_context(open_cluster(engine.file, limit=engine.limit))
        sweep = _with_arms(sweep, session)
        arms = {choice.arm for choice in sweep.arms}
        if engine.rotate:
            session.turn_to(session.lock.turn)  # refused where cluster.yaml forbids to move services
        serving = {
            service.name: _serving(session, service, engine.replicas)
            for service in session.cluster.services
            if service.arm in arms
        }
        specs = [spec for some in serving.values() for spec in _specs(session, some, rotates=engine.rotate)]
        places = {
            (name, one.at.number): Place(
                session.links[one.replica.host], one.found.name, one.replica.port, one.replica.service.bind
            )
            for name, some in serving.items()
            for one in some
        }
        launcher = ContainerLauncher(places, note=note)
        rotation = mover = None
        if engine.rotate:
            cards = session.known_cards()
            measured = {name: [one.replica for one in some] for name, some in serving.items()}
            every = [replica for some in measured.values() for replica in some]
            sweep = rotating(sweep, session.cluster, every, cards, note=note)
            rotation = plan_rotation(session.cluster, measured, cards, sweep.repeats)
            images = {name: some[0].found.image for name, some in serving.items()}
            mover = ClusterMover(session, rotation, measured, images)
        close = stack.pop_all().close
        cards_watch = watch_cards(session.links, [one for some in serving.values() for one in some])
        return Attached(sweep, specs, launcher, _fingerprint(session), close, rotation, mover, cards_watch)
    raise AssertionError("not reached")


def watch_cards(links: Mapping[str, HostLink], serving: Iterable[Serving]) -> CardWatch | None:
    """Who looks at the replicas' GPUs, on the hosts where they are; null where no replica has one."""
    hosts = {one.at.host for one in serving if one.at.gpus}
    return CardWatch({host: links[host] for host in sorted(hosts)}) if hosts else None


def _with_arms(sweep: Sweep, session: ClusterSession) -> Sweep:
    """Without arms of its own, a sweep measures the services as they were deployed."""
    if "arms" in sweep.model_fields_set:
        return sweep
    budgets: dict[tuple[Arm, Builder | None], list[int]] = {}
    for service in session.cluster.services:
        found = budgets.setdefault((service.arm, _builder(service)), [])
        if service.budget is not None and service.budget not in found:
            found.append(service.budget)
    own = "budgets" not in sweep.model_fields_set
    choices = [
        ArmChoice(arm=arm, builder=builder, budgets=sorted(some) if some and own else None)
        for (arm, builder), some in budgets.items()
    ]
    return sweep.model_copy(update={"arms": choices})


def _builder(service: Service) -> Builder | None:
    return (service.builder or Builder.BEST_FIRST) if service.arm.takes_budget else None


def _serving(session: ClusterSession, service: Service, most: int | None) -> list[Serving]:
    """The service's replicas with their containers, or the first `most` of them.

    Raises BadEnvironment where one does not run: fewer replicas would be another service.
    """
    found: list[Serving] = []
    troubles: list[str] = []
    cards = session.cards()
    for host in session.inventory.names:
        if service.hosts is not None and host not in service.hosts:
            continue
        for index, port in enumerate(service.ports):
            if most is not None and len(found) + len(troubles) == most:
                break
            if host in session.unreachable:
                troubles.append(f"{host} does not answer: {session.unreachable[host]}")
                break
            replica = Replica(service, host, index, port)
            name = replica.container(session.cluster.name)
            container = session.engine(host).find(name)
            if container is None or not container.running:
                troubles.append(f"{host}/{name}: {container.outcome if container else NO_CONTAINER}")
                continue
            at = seat(replica, container.gpus, cards.get(host, ()), number=len(found))
            found.append(Serving(replica, container, at))
    if troubles or not found:
        whole = "" if not found else " as a whole"
        raise BadEnvironment(
            f"service {service.name} does not run{whole}: {'; '.join(troubles) or 'it has no host'}",
            remedy="`ddtree deploy up` starts it; `replicas` or `limit` in `engine` leave replicas out",
        )
    return found


def _specs(session: ClusterSession, replicas: Sequence[Serving], *, rotates: bool) -> list[ServiceSpec]:
    """A service's replicas as a sweep sees them. Raises BadInput where they are not alike."""
    # Another card is another cell, since cards differ; a rotation keys a cell by all the cards that it has,
    # and several replicas by the cards of them all.
    alone = len(replicas) == 1 and not rotates
    specs = [_spec(session, one, alone=alone) for one in replicas]
    require_alike(specs)
    return specs


def _spec(session: ClusterSession, one: Serving, *, alone: bool) -> ServiceSpec:
    service, cluster = one.replica.service, session.cluster
    url = session.url(one.replica)
    fixed = service.budget if cluster.engine is EngineKind.SGLANG else None
    entry = ExternalService(arm=service.arm, budget=fixed, url=HttpUrl(url))
    spec = describe_service(entry, fetch_server_info(url, headers=session.headers))
    place = (f"host={one.replica.host}", f"gpus={','.join(one.found.gpus)}") if alone else ()
    return replace(
        spec,
        name=service.name,
        identity=replace(spec.identity, argv=(*spec.identity.argv, *place), image_digest=one.found.image),
        expected=expected_block(cluster, service),
        arguments=expected_arguments(cluster, service),
        headers=session.headers,
        at=one.at,
    )


def _fingerprint(session: ClusterSession) -> str:
    """sha256 over the hosts and the cards that were there at the last `up`."""
    cards = {host: sorted(card.uuid for card in some) for host, some in session.lock.cards.items()}
    places: dict[str, Any] = {host: cards.get(host, []) for host in session.inventory.names}
    text = json.dumps(places, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
