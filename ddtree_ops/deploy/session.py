"""A cluster opened for work: its hosts behind links, its secrets, its lock file.

A host that cannot be reached is not down: it is kept apart with the reason, and nothing is concluded from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ddtree_ops.config_file import load_config
from ddtree_ops.containers.connection import HostLink, HostUnreachable, SshTarget
from ddtree_ops.containers.engine import Engine
from ddtree_ops.deploy.layout import Card, Replica, cards_of, lay_out
from ddtree_ops.deploy.lockfile import LockFile, read_lock
from ddtree_ops.deploy.render import KEY_VARIABLE
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.ansible_facts import AnsibleHosts, ssh_options
from ddtree_ops.hosts.facts import HostFacts, parse_facts
from ddtree_ops.hosts.inventory import Host, Inventory, load_inventory
from ddtree_ops.hosts.runner import Event
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.schemas.cluster import Checkpoint, Cluster, EngineKind

#: A variable of a host for the socket of its Docker engine.
SOCKET_VARIABLE = "ddtree_docker_socket"
MOST_AT_ONCE = 16
#: How long commands that only look try to reach a host.
LOOK_S = 5.0

T = TypeVar("T")


@dataclass
class ClusterSession:
    """An open cluster.

    inventory    the hosts that are worked on; `whole` has those that a limit left out, too
    unreachable  hosts without an answer, and why; grows while work goes on
    secrets      values by variable, for containers
    """

    cluster: Cluster
    file: Path
    inventory: Inventory
    whole: Inventory
    links: dict[str, HostLink]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    unreachable: dict[str, str] = field(default_factory=dict)
    lock: LockFile = field(default_factory=LockFile)

    @property
    def folder(self) -> Path:
        """Of cluster.yaml: paths in it are relative to this."""
        return self.file.parent

    @property
    def logs(self) -> Path:
        """Where logs of containers and playbooks are kept on this machine."""
        return log_folder(self.file, self.cluster)

    @property
    def hosts(self) -> list[str]:
        """Those that can be reached."""
        return [name for name in self.inventory.names if name not in self.unreachable]

    @property
    def headers(self) -> dict[str, str]:
        """What a request to a service needs."""
        key = self.secrets.get(KEY_VARIABLE)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def engine(self, host: str) -> Engine:
        return self.links[host].engine()

    def url(self, replica: Replica) -> str:
        """The replica's base address on this machine. Raises HostUnreachable."""
        return self.links[replica.host].forward(replica.service.bind, replica.port)

    def turn_to(self, turn: int | None) -> None:
        """Move services on to other cards; null leaves them. Raises BadInput where the file forbids it."""
        if turn is None:
            return
        if not self.cluster.rotation.enabled:
            allowed = "true, so that --rotate may move services"
            raise BadInput.at(file=self.file, key="rotation.enabled", found=False, allowed=allowed)
        self.lock = self.lock.model_copy(update={"turn": turn})

    def revisions(self) -> dict[str, str]:
        """Commits by repository, for models whose branch was resolved."""
        found = {}
        for model in (self.cluster.model, self.cluster.drafter):
            if model is not None and model.repo is not None:
                commit = self.lock.revisions.get(f"{model.repo}@{model.revision}")
                if commit is not None:
                    found[model.repo] = commit
        return found

    def branches(self) -> list[Checkpoint]:
        """Models whose revision names no commit and was not resolved yet."""
        known = self.revisions()
        models = [model for model in (self.cluster.model, self.cluster.drafter) if model is not None]
        return [model for model in models if not model.pinned and model.repo not in known]

    def facts(
        self, on_event: Callable[[Event], None] | None = None, *, hosts: Sequence[str] | None = None
    ) -> dict[str, HostFacts]:
        """Facts of the hosts (null: all that can be reached), read anew; lost ones join the unreachable."""
        wanted = self.hosts if hosts is None else list(hosts)
        if not wanted:
            return {}
        provider = AnsibleHosts.of(self.cluster, self.folder, limit=wanted, on_event=on_event)
        captures = provider.captures()
        self.unreachable |= provider.unreachable()
        return {name: parse_facts(capture, name=name) for name, capture in captures.items()}

    def cards(self, facts: Mapping[str, HostFacts] | None = None) -> dict[str, tuple[Card, ...]]:
        """Cards by host, from facts or else as they were at the last `up`; empty for the CPU engine."""
        if self.cluster.engine is EngineKind.REFERENCE:
            return {}
        if facts is not None:
            return {host: cards_of(found) for host, found in facts.items()}
        return {host: self.lock.cards_of(host) for host in self.hosts}

    def known_cards(self) -> dict[str, tuple[Card, ...]]:
        """As they were at the last `up`; read now on hosts that were never brought up from here."""
        cards = self.cards()
        new = [host for host, some in cards.items() if not some]
        return {**cards, **self.cards(self.facts(hosts=new))} if new else cards

    def replicas(
        self, cards: Mapping[str, Sequence[Card]], services: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> list[Replica]:
        """Replicas of the named services (none: all) on the named hosts (none: all that can be reached)."""
        wanted = set(services)
        found = lay_out(self.cluster, hosts or self.hosts, cards, turn=self.lock.turn)
        return [one for one in found if not wanted or one.service.name in wanted]

    def require_services(self, names: Iterable[str], *, gateways: bool = False) -> None:
        """Raise BadInput for a service (or, where they count, a gateway) that is not in cluster.yaml."""
        known = [service.name for service in self.cluster.services]
        known += [gateway.name for gateway in self.cluster.gateways if gateways]
        for name in names:
            if name not in known:
                raise BadInput.at(file=self.file, key="--service", found=name, allowed=", ".join(known))

    def together(self, work: Callable[[list[str]], T], hosts: Iterable[str]) -> T:
        """Do something with several hosts at once; begun anew without those that are lost meanwhile."""
        names = list(hosts)
        while True:
            try:
                return work(names)
            except HostUnreachable as gone:
                lost = [name for name in names if not self.links[name].alive()]
                if not lost:
                    raise
                self.unreachable |= dict.fromkeys(lost, gone.message)
                names = [name for name in names if name not in lost]

    def each(self, work: Callable[[str], T], hosts: Iterable[str] | None = None) -> dict[str, T]:
        """Do something on every host that can be reached, all at once; those lost join the unreachable.

        Other errors are raised, once every host is through.
        """
        names = list(self.hosts if hosts is None else hosts)
        if not names:
            return {}
        with ThreadPoolExecutor(min(len(names), MOST_AT_ONCE)) as pool:
            jobs = {name: pool.submit(work, name) for name in names}
        done: dict[str, T] = {}
        for name, job in jobs.items():
            try:
                done[name] = job.result()
            except HostUnreachable as gone:
                self.unreachable[name] = gone.message
        return done


@contextmanager
def open_cluster(
    file: Path, *, limit: Sequence[str] = (), connect: bool = True, patience_s: float | None = None
) -> Iterator[ClusterSession]:
    """Read a cluster.yaml and connect to its hosts, or to those that are named.

    connect     false leaves connecting to the first use
    patience_s  how long connecting is tried; null: a link's own patience
    Raises BadInput, BadEnvironment; hosts without an answer are in `unreachable`.
    """
    cluster = load_config(file, Cluster)
    whole = load_inventory(cluster, file.parent)
    inventory = whole.limited(list(limit))
    key = resolve_secret(cluster.secrets.api_key, key="secrets.api_key", folder=file.parent)
    ssh = ssh_options(cluster, file.parent)
    logs = log_folder(file, cluster)
    links = {
        host.name: HostLink(
            host.name, SshTarget.of(host, ssh, docker_socket=_socket(cluster, host)), log_folder=logs
        )
        for host in inventory.hosts
    }
    secrets = {} if key is None else {KEY_VARIABLE: key}
    session = ClusterSession(cluster, file, inventory, whole, links, secrets, lock=read_lock(file))
    try:
        if connect:
            session.each(lambda host: links[host].connect(patience_s=patience_s))
        yield session
    finally:
        for link in links.values():
            link.close()


def log_folder(file: Path, cluster: Cluster) -> Path:
    return file.parent / "ddtree-logs" / cluster.name


def _socket(cluster: Cluster, host: Host) -> str:
    return str(host.variables.get(SOCKET_VARIABLE, cluster.runtime.socket))
