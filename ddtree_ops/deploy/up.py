"""Bring a cluster to what cluster.yaml says, and nothing else: what is equal stays as it is.

Phase by phase, each with its deadline: memory, hosts that answer, models' commits, provisioning, facts and
checks, image, the way between GPUs, containers, readiness. Work on a host is made of steps that are found
anew after a break, so that a lost connection costs time and nothing else: a host that stays away is reported
and left as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_ops.containers.connection import DockerFailure, HostUnreachable, worth_trying
from ddtree_ops.containers.engine import Engine
from ddtree_ops.deploy.images import ensure_images
from ddtree_ops.deploy.layout import CANNOT_PLACE, Card, Replica, lay_out
from ddtree_ops.deploy.lockfile import write_lock
from ddtree_ops.deploy.memory import memory_of, require_fit
from ddtree_ops.deploy.p2p import require_peers
from ddtree_ops.deploy.plan import needs_facts, steps_on, with_cards_to_come
from ddtree_ops.deploy.provision import provision
from ddtree_ops.deploy.ready import wait_for
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.steps import Action, Step, previous_name
from ddtree_ops.errors import DdtreeError, JobFailed
from ddtree_ops.gateway.deploy import gateway_hosts, gateway_steps, wait_gateways
from ddtree_ops.gateway.image import ensure_gateway_images
from ddtree_ops.hosts.checks import Status, check_host, expectations
from ddtree_ops.hosts.facts import HostFacts
from ddtree_ops.hosts.hub import probe_revision
from ddtree_ops.hosts.runner import Event
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.output import Output

#: Between two tries to reach a host, and between two lines that say so.
RETRY_S = 2.0
SAY_SO_S = 15.0


@dataclass(frozen=True)
class Options:
    """What to do and what to leave out.

    services      the only ones to work on; empty for all
    tags          parts of the playbooks; empty for all
    provisioning  false: hosts are taken as they are
    recreate      replace containers that are equal, too (a rotated key)
    restore       put the previous container back when the new one does not serve
    checks        false: failed checks of hosts stop nothing
    """

    services: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    provisioning: bool = True
    recreate: bool = False
    restore: bool = True
    checks: bool = True


@dataclass
class Report:
    """What `up` did. `failed` says why by container or host; `logs` are files that were kept of failures."""

    provisioned: int = 0
    images: int = 0
    steps: list[Step] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    logs: list[Path] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        return self.provisioned + self.images + sum(step.action.changes for step in self.steps)

    @property
    def good(self) -> bool:
        return not self.failed and not self.unreachable

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.good,
            "changes": self.changes,
            "provisioned": self.provisioned,
            "images": self.images,
            "steps": [step.as_json() for step in self.steps],
            "containers": self.containers,
            "failed": self.failed,
            "restored": self.restored,
            "unreachable": self.unreachable,
            "logs": [str(file) for file in self.logs],
            "seconds": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
        }


def bring_up(session: ClusterSession, options: Options, out: Output) -> Report:
    """Do it. Failures of single hosts and containers are in the report.

    Raises BadInput for what does not fit, JobFailed when no host is left to work on.
    """
    return Up(session, options, out).run()


class Up:
    """One pass through the phases."""

    def __init__(
        self,
        session: ClusterSession,
        options: Options,
        out: Output,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session = session
        self._options = options
        self._out = out
        self._clock = clock
        self._sleep = sleep
        self._report = Report()
        self._replaced: set[tuple[str, str]] = set()
        self._served: set[tuple[str, str]] = set()
        self._skip: set[str] = set()
        self._drivers: dict[str, str | None] = {}

    def run(self) -> Report:
        session, options = self._session, self._options
        session.require_services(options.services)
        require_fit(memory_of(session.cluster))
        with self._phase("hosts"):
            self._reach_hosts()
        facts = None
        if needs_facts(session):
            with self._phase("cards"):
                facts = self._require_cards()
        with self._phase("models"):
            self._resolve_revisions()
        if options.provisioning:
            with self._phase("provision"):
                self._provision()
        with self._phase("facts"):
            cards = self._look_at_cards(None if options.provisioning else facts)
        with self._phase("image"):
            images = self._images()
        with self._phase("containers"):
            self._containers(cards, images)
        with self._phase("ready"):
            self._readiness()
        if session.cluster.gateways:
            with self._phase("gateways"):
                self._gateways()
        self._report.unreachable = dict(session.unreachable)
        return self._report

    # Hosts

    def _reach_hosts(self) -> None:
        """Hosts that do not answer yet may be booting after a new driver: they have their time."""
        session = self._session
        deadline = self._clock() + session.cluster.deadlines.connect
        session.unreachable.clear()
        session.each(lambda host: self._reach(host, deadline))
        self._require_hosts()

    def _reach(self, host: str, deadline: float) -> None:
        """Connect. Raises HostUnreachable after the deadline, and at once for what waiting does not mend."""
        link, said = self._session.links[host], -math.inf
        while True:
            try:
                return link.connect(patience_s=0)
            except HostUnreachable as gone:
                now = self._clock()
                if now >= deadline or link.closed or not worth_trying(gone):
                    raise
                if now - said >= SAY_SO_S:
                    said = now
                    self._out.note(f"{gone.message}; waiting for it, {deadline - now:.0f} s left")
                self._sleep(min(RETRY_S, deadline - now))

    def _require_cards(self) -> dict[str, HostFacts]:
        """Every host has the cards that its services want, or nothing is changed. Raises CANNOT_PLACE.

        Provisioning may yet bring the driver, and make a host readable that is not.
        """
        session, later = self._session, self._options.provisioning
        lost = dict(session.unreachable)
        facts = session.facts(self._task)
        cards = session.cards(facts)
        if later:
            cards = with_cards_to_come(session, cards)
            session.unreachable = lost
        refused = []
        for host, some in cards.items():
            try:
                lay_out(session.cluster, [host], {host: some}, turn=session.lock.turn)
            except CANNOT_PLACE as why:
                refused.append(why)
        if refused:
            raise type(refused[0])("\n  ".join(why.message for why in refused), remedy=refused[0].remedy)
        return facts

    def _resolve_revisions(self) -> None:
        """Branches become commits, once: what is served must not move by itself."""
        session, found = self._session, {}
        cluster = session.cluster
        token = resolve_secret(cluster.secrets.hf_token, key="secrets.hf_token", folder=session.folder)
        for model in session.branches():
            assert model.repo is not None
            answer = probe_revision(model.repo, model.revision, token=token)
            if answer.commit is None:
                self._out.warning(f"{model.repo}@{model.revision} stays a branch: {answer.detail}")
            else:
                found[f"{model.repo}@{model.revision}"] = answer.commit
        session.lock = session.lock.with_revisions(found)
        write_lock(session.file, session.lock)

    def _provision(self) -> None:
        session = self._session
        self._require_hosts()
        outcome = provision(
            session.cluster,
            session.folder,
            session.inventory.limited(session.hosts),
            whole=session.whole,
            revisions=session.revisions(),
            tags=self._options.tags,
            log_folder=session.logs,
            on_event=self._task,
        )
        session.unreachable |= outcome.unreachable
        self._report.provisioned = sum(host.changed for host in outcome.hosts.values())
        for host, message in outcome.failed.items():
            self._fail_host(host, f"provisioning: {message}")
        if outcome.status.value != "ok" and not outcome.failed and not outcome.unreachable:
            outcome.require_ok()
        if outcome.log is not None and outcome.failed:
            self._report.logs.append(outcome.log)

    def _look_at_cards(self, facts: dict[str, HostFacts] | None) -> dict[str, tuple[Card, ...]]:
        """Cards by host. `facts` that are fresh are not read again."""
        session = self._session
        self._require_hosts()
        if not needs_facts(session):
            return {}
        if facts is None:
            facts = session.facts(self._task)
        self._drivers = {host: found.cuda for host, found in facts.items()}
        for host, found in facts.items():
            bad = [
                f"{finding.id}: {finding.found} ({finding.remedy})"
                for finding in check_host(found, expectations(session.cluster, host))
                if finding.status is Status.FAIL
            ]
            if bad and self._options.checks:
                self._fail_host(host, "checks failed: " + "; ".join(bad))
        cards = session.cards(facts)
        session.lock = session.lock.with_cards(cards)
        write_lock(session.file, session.lock)
        return cards

    def _images(self) -> dict[str, str]:
        """A host that is lost on the way is waited for; the others do not wait for ever."""
        self._require_hosts()
        deadline = self._clock() + self._session.cluster.deadlines.ready
        while True:
            try:
                images, self._report.images = ensure_images(
                    self._session, self._hosts(), self._out.note, self._drivers
                )
                return images
            except HostUnreachable as gone:
                late = self._clock() >= deadline
                lost = [host for host in self._hosts() if late and not self._session.links[host].alive()]
                if late and not lost:
                    raise
                self._session.unreachable |= dict.fromkeys(lost, gone.message)
                self._require_hosts()
                self._out.note(f"{gone.message}; trying again")
                self._sleep(RETRY_S)

    # Containers

    def _containers(self, cards: Mapping[str, Sequence[Card]], images: Mapping[str, str]) -> None:
        hosts = [host for host in self._hosts() if host in images]

        def work(host: str) -> list[Step]:
            try:
                return self._host(host, cards, images)
            except HostUnreachable:
                raise
            except DdtreeError as error:  # one host's trouble is not the others'
                self._fail_host(host, error.message)
                return []

        done = self._session.each(work, hosts)
        self._report.steps = [step for host in hosts for step in done.get(host, ())]

    def _host(self, host: str, cards: Mapping[str, Sequence[Card]], images: Mapping[str, str]) -> list[Step]:
        """All steps of a host for its replicas."""
        services = self._options.services

        def look(recreate: bool) -> list[Step]:
            return steps_on(self._session, host, cards, images, services=services, recreate=recreate)

        return self._work(host, look, images[host])

    def _work(self, host: str, look: Callable[[bool], list[Step]], image: str) -> list[Step]:
        """Steps are done, and begun anew after a break until the deadline is over."""
        deadline = self._clock() + self._session.cluster.deadlines.ready
        first: list[Step] | None = None
        while True:
            try:
                steps = look(self._options.recreate and first is None)
                first = steps if first is None else first
                self._apply(host, steps, image)
                return first
            except HostUnreachable as gone:
                if self._clock() >= deadline or self._session.links[host].closed:
                    raise
                self._out.note(f"{host}: {gone.message}; trying again, nothing is torn down")
                self._sleep(RETRY_S)

    def _apply(self, host: str, steps: Sequence[Step], image: str) -> None:
        """Stop and move aside all that goes, then start all that comes: services may swap their GPUs."""
        engine = self._session.engine(host)
        coming = [step for step in steps if step.action.changes and step.spec is not None]
        for step in coming:
            if _wide(step):
                with self._told(step):
                    require_peers(engine, self._session.cluster.name, step, image)
        for step in steps:
            going = step.action in {Action.REMOVE, Action.REPLACE, Action.RESTART}
            if going and not self._is_failed(step):
                self._out.note(f"{host}: {step.action.value} {step.name}: {step.reason}")
                with self._told(step):
                    self._make_room(engine, step)
        for step in coming:
            if not self._is_failed(step):
                with self._told(step):
                    self._begin(engine, step)

    @contextmanager
    def _told(self, step: Step) -> Iterator[None]:
        """A step that fails is told and keeps no other from being done; a lost host ends them all."""
        try:
            yield
        except HostUnreachable:
            raise
        except DdtreeError as error:
            remedy = f" (try: {error.remedy})" if error.remedy else ""
            self._report.failed[self._label(step)] = f"{error.message}{remedy}"

    def _make_room(self, engine: Engine, step: Step) -> None:
        found = engine.find(step.name)
        if found is not None and found.running:
            self._served.add((step.host, step.name))
        engine.stop(step.name)
        if step.action is Action.REMOVE:
            self._discard(engine, previous_name(step.name))
            self._discard(engine, step.name)
        elif step.action is Action.REPLACE:
            self._keep_previous(engine, step)

    def _keep_previous(self, engine: Engine, step: Step) -> None:
        """The replaced one is kept for a rollback, unless it was dead and an older one is there already."""
        name, previous = step.name, previous_name(step.name)
        older = engine.find(previous)
        self._replaced.add((step.host, name))
        if older is not None and (step.host, name) not in self._served:
            self._discard(engine, name)
            return
        if older is not None:
            self._discard(engine, previous)
        engine.rename(name, previous)

    def _begin(self, engine: Engine, step: Step) -> None:
        assert step.spec is not None
        if step.action in {Action.CREATE, Action.REPLACE}:
            engine.create(step.spec, self._session.secrets)
        engine.start(step.name)

    def _discard(self, engine: Engine, name: str) -> None:
        found = engine.find(name)
        if found is None:
            return
        if found.running:
            engine.stop(name)
        engine.remove(name, log_folder=self._session.logs)

    # Readiness

    def _readiness(self) -> None:
        """Every container that was worked on serves, or its log is kept and the previous one comes back."""
        session = self._session
        wanted = [step for step in self._report.steps if step.replica is not None]
        begun = [step for step in wanted if not self._is_failed(step)]
        bad = wait_for(session, [_replica(step) for step in begun], note=self._out.note)
        by_place = {(step.host, step.name): step for step in self._report.steps}
        failed = []
        for one in bad:
            name = one.replica.container(session.cluster.name)
            if one.unreachable:
                session.unreachable[one.replica.host] = one.message
                continue
            step = by_place[one.replica.host, name]
            self._report.failed[self._label(step)] = one.message
            failed.append(step)
        failed += [step for step in self._report.steps if self._is_failed(step) and step not in failed]
        for step in failed:
            with self._kept(step):
                self._give_up(step)
        for step in self._report.steps:
            if step.replica is not None and step.host not in session.unreachable:
                with suppress(DdtreeError):
                    found = session.engine(step.host).find(step.name)
                    if found is not None:
                        self._report.containers[f"{step.host}/{step.name}"] = found.id
        back = [_replica(step) for step in failed if self._label(step) in self._report.restored]
        for one in wait_for(session, back, note=self._out.note, as_asked=False):
            name = one.replica.container(session.cluster.name)
            self._report.failed[f"{one.replica.host}/{name}"] += f"; the previous one, too: {one.message}"

    # Gateways

    def _gateways(self) -> None:
        """The front doors come last: what they lead to serves by now."""
        session, services = self._session, self._options.services
        images = ensure_gateway_images(
            session, gateway_hosts(session, services), lambda event: self._out.note(str(event))
        )

        def work(host: str) -> list[Step]:
            def look(recreate: bool) -> list[Step]:
                return gateway_steps(session, host, images, services=services, recreate=recreate)

            return self._work(host, look, images.get(host, ""))

        done = session.each(work, self._hosts())
        steps = [step for host in self._hosts() for step in done.get(host, ())]
        self._report.steps += steps
        begun = {(step.host, step.name): step for step in steps if step.spec and not self._is_failed(step)}
        for place, why in wait_gateways(session, begun, note=self._out.note).items():
            self._report.failed[self._label(begun[place])] = why
        for step in steps:
            if self._is_failed(step):
                with self._kept(step):
                    self._give_up(step)
            elif step.spec is not None:
                found = session.engine(step.host).find(step.name)
                if found is not None:
                    self._report.containers[self._label(step)] = found.id

    def _give_up(self, step: Step) -> None:
        engine = self._session.engine(step.host)
        if engine.find(step.name) is not None:
            self._report.logs.append(engine.dump_logs(step.name, self._session.logs))
        replaced = (step.host, step.name) in self._replaced
        if not self._options.restore or not replaced or engine.find(previous_name(step.name)) is None:
            return
        self._discard(engine, step.name)
        engine.rename(previous_name(step.name), step.name)
        engine.start(step.name)
        self._report.restored.append(self._label(step))
        self._out.warning(f"{self._label(step)}: the previous container is back")

    @contextmanager
    def _kept(self, step: Step) -> Iterator[None]:
        """What goes wrong while a failure is cleaned up is told, and does not hide it."""
        try:
            yield
        except HostUnreachable as gone:
            self._session.unreachable[step.host] = gone.message
        except DockerFailure as failure:
            self._report.failed[self._label(step)] += f"; then {failure.message}"

    # Helpers

    def _hosts(self) -> list[str]:
        return [host for host in self._session.hosts if host not in self._skip]

    def _require_hosts(self) -> None:
        if self._hosts():
            return
        lost = self._session.unreachable
        lines = [f"{host}: unreachable (left alone): {why}" for host, why in lost.items()]
        lines += [f"{host}: {why}" for host, why in self._report.failed.items()]
        raise JobFailed("no host is left to work on\n  " + "\n  ".join(lines))

    def _fail_host(self, host: str, message: str) -> None:
        self._skip.add(host)
        self._report.failed[host] = message
        self._out.warning(f"{host}: {message}")

    def _is_failed(self, step: Step) -> bool:
        return self._label(step) in self._report.failed

    def _label(self, step: Step) -> str:
        return f"{step.host}/{step.name}"

    def _task(self, event: Event) -> None:
        self._out.event("task", host=event.host, task=event.task, status=event.status)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = self._clock()
        self._out.event("phase", name=name, state="begun")
        self._out.note(f"{name} ...")
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._report.seconds[name] = seconds
            self._out.event("phase", name=name, state="ended", seconds=round(seconds, 1))


def _wide(step: Step) -> bool:
    return step.spec is not None and len(step.spec.gpus) > 1


def _replica(step: Step) -> Replica:
    assert step.replica is not None
    return step.replica
