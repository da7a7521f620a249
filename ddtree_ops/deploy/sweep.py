"""The services of a cluster as services of a sweep: asked what they are, watched through their engines.

Of a service with several replicas the first that runs is measured: a sweep compares arms, not load balancers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pydantic import HttpUrl

from ddtree_ops.bench.sweep import Attached
from ddtree_ops.containers.found import Found
from ddtree_ops.containers.service import ContainerLauncher, Place
from ddtree_ops.deploy.layout import Replica
from ddtree_ops.deploy.render import expected_arguments, expected_block
from ddtree_ops.deploy.rotation import ClusterMover, plan_rotation, rotating
from ddtree_ops.deploy.session import ClusterSession, open_cluster
from ddtree_ops.errors import BadEnvironment
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.cluster import EngineKind, Service
from ddtree_ops.schemas.sweep import ArmChoice, ClusterEngine, ExternalService, Sweep
from ddtree_ops.services.base import ServiceSpec
from ddtree_ops.services.discover import describe_service, fetch_server_info

Note = Callable[[str], None]


@dataclass(frozen=True)
class Serving:
    """A service, the replica of it that is measured, and that replica's container."""

    replica: Replica
    found: Found


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
        serving = [_serving(session, service) for service in session.cluster.services if service.arm in arms]
        specs = [_spec(session, one, rotates=engine.rotate) for one in serving]
        places = {
            spec.name: Place(
                session.links[one.replica.host],
                one.found.name,
                one.replica.port,
                one.replica.service.bind,
            )
            for spec, one in zip(specs, serving, strict=True)
        }
        launcher = ContainerLauncher(places, note=note)
        rotation = mover = None
        if engine.rotate:
            cards = session.known_cards()
            measured = {spec.name: one.replica for spec, one in zip(specs, serving, strict=True)}
            sweep = rotating(sweep, session.cluster, measured.values(), cards, note=note)
            rotation = plan_rotation(session.cluster, measured, cards, sweep.repeats)
            images = {spec.name: one.found.image for spec, one in zip(specs, serving, strict=True)}
            mover = ClusterMover(session, rotation, measured, images)
        close = stack.pop_all().close
        return Attached(sweep, specs, launcher, _fingerprint(session), close, rotation, mover)
    raise AssertionError("not reached")


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


def _serving(session: ClusterSession, service: Service) -> Serving:
    """The service's first replica whose container runs."""
    troubles = []
    for host in session.inventory.names:
        if service.hosts is not None and host not in service.hosts:
            continue
        if host in session.unreachable:
            troubles.append(f"{host} does not answer: {session.unreachable[host]}")
            continue
        for index, port in enumerate(service.ports):
            replica = Replica(service, host, index, port)
            name = replica.container(session.cluster.name)
            found = session.engine(host).find(name)
            if found is not None and found.running:
                return Serving(replica, found)
            troubles.append(f"{host}/{name}: {found.outcome if found else 'there is no container'}")
    raise BadEnvironment(
        f"service {service.name} does not run: {'; '.join(troubles)}", remedy="`ddtree deploy up` starts it"
    )


def _spec(session: ClusterSession, one: Serving, *, rotates: bool) -> ServiceSpec:
    service, cluster = one.replica.service, session.cluster
    url = session.url(one.replica)
    fixed = service.budget if cluster.engine is EngineKind.SGLANG else None
    entry = ExternalService(arm=service.arm, budget=fixed, url=HttpUrl(url))
    spec = describe_service(entry, fetch_server_info(url, headers=session.headers))
    # Another card is another cell, since cards differ; a rotation keys a cell by all the cards that it has.
    place = () if rotates else (f"host={one.replica.host}", f"gpus={','.join(one.found.gpus)}")
    argv = (*spec.identity.argv, *place)
    return replace(
        spec,
        name=service.name,
        identity=replace(spec.identity, argv=argv, image_digest=one.found.image),
        expected=expected_block(cluster, service),
        arguments=expected_arguments(cluster, service),
        headers=session.headers,
    )


def _fingerprint(session: ClusterSession) -> str:
    """sha256 over the hosts and the cards that were there at the last `up`."""
    cards = {host: sorted(card.uuid for card in some) for host, some in session.lock.cards.items()}
    places: dict[str, Any] = {host: cards.get(host, []) for host in session.inventory.names}
    text = json.dumps(places, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
