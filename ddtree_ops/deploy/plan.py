"""What `up` would do, host by host: provisioning, image, containers, memory. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.containers.connection import DockerFailure
from ddtree_ops.deploy.images import NOT_YET, PlannedImage, planned_images
from ddtree_ops.deploy.layout import CANNOT_PLACE, Card, Replica
from ddtree_ops.deploy.memory import Fit, memory_of, require_fit
from ddtree_ops.deploy.provision import provision
from ddtree_ops.deploy.render import Surroundings, render
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import Step, steps_of
from ddtree_ops.gateway.deploy import gateway_hosts, gateway_steps
from ddtree_ops.gateway.image import planned_gateway_images
from ddtree_ops.hosts.checks import Finding, Status, check_host, expectations
from ddtree_ops.hosts.runner import Change, Event

OnEvent = Callable[[Event], None]


@dataclass
class HostPlan:
    """What would happen on one host. `error` says why Ansible's check could not go through.

    bare     there is no Docker yet; provisioning would bring it
    refused  why nothing can be placed there: it has too few cards
    """

    host: str
    bare: bool = False
    changes: list[Change] = field(default_factory=list)
    error: str | None = None
    refused: str | None = None
    findings: list[Finding] = field(default_factory=list)
    image: str = ""
    steps: list[Step] = field(default_factory=list)


@dataclass
class ClusterPlan:
    """What would happen; `unknown` are hosts that do not answer.

    provisioning  whether hosts would be provisioned first, which can mend what checks find
    """

    provisioning: bool
    hosts: list[HostPlan]
    fits: list[Fit]
    unknown: dict[str, str]

    @property
    def changes(self) -> int:
        """How many things `up` would change, as far as is known."""
        return sum(
            len(host.changes)
            + (not host.image.startswith("present"))
            + sum(step.action.changes for step in host.steps)
            for host in self.hosts
        )

    @property
    def refused(self) -> bool:
        """Whether `up` would change nothing at all."""
        return any(host.refused for host in self.hosts)

    @property
    def blocked(self) -> bool:
        """Whether `up` would stop on a host."""
        failed = any(finding.status is Status.FAIL for host in self.hosts for finding in host.findings)
        return self.refused or (failed and not self.provisioning) or any(host.error for host in self.hosts)

    def as_json(self) -> dict[str, Any]:
        return {
            "changes": self.changes,
            "blocked": self.blocked,
            "hosts": [
                {
                    "host": host.host,
                    "bare": host.bare,
                    "changes": [vars(change) for change in host.changes],
                    "error": host.error,
                    "refused": host.refused,
                    "findings": [finding.as_json() for finding in host.findings],
                    "image": host.image,
                    "containers": [step.as_json() for step in host.steps],
                }
                for host in self.hosts
            ],
            "memory": [
                {
                    "service": fit.service,
                    "verdict": fit.verdict.value if fit.verdict else None,
                    "reason": fit.reason,
                    "knobs": list(fit.knobs),
                }
                for fit in self.fits
            ],
            "unknown": self.unknown,
        }


def make_plan(
    session: ClusterSession,
    *,
    services: Sequence[str] = (),
    tags: Sequence[str] = (),
    provisioning: bool = True,
    recreate: bool = False,
    on_event: OnEvent | None = None,
) -> ClusterPlan:
    """Look at every host. Raises BadInput for what does not fit, JobFailed when docker refuses to answer."""
    session.require_services(services)
    fits = memory_of(session.cluster)
    require_fit(fits)
    plans = {host: HostPlan(host) for host in session.hosts}
    if provisioning and plans:
        _check_mode(session, plans, tags, on_event)
    facts = session.facts(on_event) if needs_facts(session) else None
    for host, found in (facts or {}).items():
        findings = check_host(found, expectations(session.cluster, host))
        plans[host].findings = [one for one in findings if one.status in {Status.FAIL, Status.WARN}]
    for host in _without_docker(session, may_come=provisioning and session.cluster.runtime.manage):
        plans[host].bare = True
    drivers = {host: found.cuda for host, found in (facts or {}).items()}
    with_docker = [host for host in session.hosts if not plans[host].bare]
    images = dict.fromkeys(plans, PlannedImage(None, "would build or ship"))
    images |= session.together(lambda hosts: planned_images(session, hosts, drivers), with_docker)
    cards = session.cards(facts)
    if provisioning:
        cards = with_cards_to_come(session, cards)

    def steps(host: str) -> list[Step]:
        bare, ids = plans[host].bare, _ids(images)
        try:
            return steps_on(session, host, cards, ids, services=services, recreate=recreate, bare=bare)
        except CANNOT_PLACE as few:  # one host's trouble is not the others'
            plans[host].refused = f"{few.message} (try: {few.remedy})" if few.remedy else few.message
            return []

    for host, found_steps in session.each(steps).items():
        plans[host].image, plans[host].steps = images[host].what, found_steps
    for host, found_steps in _gateway_steps(session, services, recreate, with_docker).items():
        plans[host].steps += found_steps
    known = [plan for host, plan in plans.items() if host not in session.unreachable]
    return ClusterPlan(provisioning, known, fits, dict(session.unreachable))


def _without_docker(session: ClusterSession, *, may_come: bool) -> list[str]:
    """Hosts whose engine does not answer. Raises DockerFailure unless provisioning may bring one."""

    def answers(host: str) -> bool:
        try:
            session.engine(host).info()
        except DockerFailure:
            if not may_come:
                raise
            return False
        return True

    return [host for host, good in session.each(answers).items() if not good]


def with_cards_to_come(
    session: ClusterSession, cards: Mapping[str, tuple[Card, ...]]
) -> dict[str, tuple[Card, ...]]:
    """Stand-ins where the driver is not there yet: how many cards there will be is known, which is not."""
    if not session.cluster.driver.manage:
        return dict(cards)
    wanted = tuple(Card(f"GPU-not-known-yet-{index}", "") for index in range(session.cluster.gpu.count))
    return {host: some or wanted for host, some in cards.items()}


def _gateway_steps(
    session: ClusterSession, services: Sequence[str], recreate: bool, hosts: Sequence[str]
) -> dict[str, list[Step]]:
    if not session.cluster.gateways:
        return {}
    wanted = [host for host in gateway_hosts(session, services) if host in hosts]
    images = session.together(lambda names: planned_gateway_images(session, names), wanted)
    return session.each(
        lambda host: gateway_steps(session, host, images, services=services, recreate=recreate),
        [host for host in hosts if host not in session.unreachable],
    )


def needs_facts(session: ClusterSession) -> bool:
    """Cards have to be looked at; the CPU engine has none."""
    return bool(session.hosts) and bool(session.cluster.engine.value == "sglang")


def steps_on(
    session: ClusterSession,
    host: str,
    cards: Mapping[str, Sequence[Card]],
    images: Mapping[str, str],
    *,
    services: Sequence[str] = (),
    recreate: bool = False,
    bare: bool = False,
) -> list[Step]:
    """Steps for one host; `bare`: it has no engine to ask yet. Raises HostUnreachable, CANNOT_PLACE."""
    cluster = session.cluster
    around = Surroundings(images[host], session.folder, session.revisions(), cards.get(host, ()))
    replicas: list[Replica] = session.replicas(cards, services, [host])
    wanted = [(replica, render(cluster, replica, around)) for replica in replicas]
    known = [service.name for service in cluster.services if service.hosts is None or host in service.hosts]
    known += [gateway.name for gateway in cluster.gateways]
    found = [] if bare else session.engine(host).ours(cluster.name)
    return steps_of(host, wanted, found, known=known, services=services, recreate=recreate)


def _check_mode(
    session: ClusterSession, plans: dict[str, HostPlan], tags: Sequence[str], on_event: OnEvent | None
) -> None:
    outcome = provision(
        session.cluster,
        session.folder,
        session.inventory.limited(session.hosts),
        whole=session.whole,
        revisions=session.revisions(),
        tags=tags,
        check=True,
        on_event=on_event,
    )
    session.unreachable |= outcome.unreachable
    for change in outcome.changes:
        plans[change.host].changes.append(change)
    for host, message in outcome.failed.items():
        plans[host].error = message
    if outcome.status.value != "ok" and not outcome.failed and not outcome.unreachable:
        outcome.require_ok()


def _ids(images: Mapping[str, PlannedImage]) -> dict[str, str]:
    return {host: image.id or NOT_YET for host, image in images.items()}
