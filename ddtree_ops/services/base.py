"""What a sweep knows of the servers that it measures, whoever runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import ReplicaAt


@dataclass(frozen=True)
class Identity:
    """What a service is, as far as it could change a number. Known before it is started."""

    engine: str
    engine_version: str
    model_sha256: str
    drafter_sha256: str | None
    dtype: str
    topk: int | None
    builder: Builder | None
    argv: tuple[str, ...]
    image_digest: str | None = None


@dataclass(frozen=True)
class ServiceSpec:
    """One replica of a service of a sweep; replicas of a service have its name.

    at        which replica it is, and where; null for the one process of a service that has no place
    budget    the budget that it serves, or null where the arm takes none or each request carries its own
    argv      the whole command line but for host, port and log file; empty for a service that runs already
    expected  what `/server_info` must say in its `ddtree` block
    arguments what it must say at its top level
    url       set for a service that runs already
    headers   of every request to it, such as an API key: never shown, never stored
    """

    name: str
    arm: Arm
    budget: int | None
    identity: Identity
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    at: ReplicaAt | None = None

    @property
    def number(self) -> int:
        """Which of its service's replicas it is."""
        return self.at.number if self.at else 0

    @property
    def label(self) -> str:
        """The service's name, with the replica's number from the second one on."""
        return f"{self.name}-{self.number}" if self.number else self.name


class Service(Protocol):
    """A server with a life: a process of ours, a container, or one that somebody else runs."""

    spec: ServiceSpec

    @property
    def url(self) -> str:
        """Base address, without a slash at the end; known after `start`."""
        ...

    @property
    def log_path(self) -> Path | None:
        """Where its output goes, if that is ours to read."""
        ...

    def start(self) -> None:
        """Begin starting; returns at once."""
        ...

    def alive(self) -> bool:
        """Whether it may still answer. Always true for a service that is not ours."""
        ...

    def exit_code(self) -> int | None:
        """Its exit status once it is dead, negative for a signal; null while alive or unknown."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log; empty where there is none."""
        ...

    def stop(self) -> None:
        """End it and everything that it started; harmless when repeated."""
        ...


@runtime_checkable
class Explained(Protocol):
    """A service that knows more of its end than an exit code."""

    def death(self) -> str | None:
        """Why it counts as dead, in words; null while it is alive."""
        ...


class Launcher(Protocol):
    """Makes services of one kind."""

    def create(self, spec: ServiceSpec) -> Service: ...
