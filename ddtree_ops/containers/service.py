"""Containers as services of a sweep: watched through their engine, reached through a forwarded port.

A container that has exited is dead, with its code and its last words. A host that cannot be reached is not a
dead container: its services count as alive for a period of grace, and say that nothing is known about them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.found import Found
from ddtree_ops.errors import BadInput, DdtreeError, JobFailed
from ddtree_ops.services.base import ServiceSpec

#: How long a host may be out of reach before its services are given up.
GRACE_S = 120.0
#: What a look at the state may cost whoever asks: a sweep's event loop stands still meanwhile.
WAIT_S = 1.0
LOG_WAIT_S = 5.0
#: A state as old as this is taken as it is.
FRESH_S = 0.2
#: An exit code above this is a signal.
SIGNAL_BASE = 128

Note = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a service's container is: a link to its host, its name, and where it listens there."""

    link: HostLink
    container: str
    port: int
    address: str = "127.0.0.1"


class ContainerService:
    """One container behind the interface of all services. Started if need be, and stopped only then.

    grace_s  how long its host may be out of reach; see the module
    wait_s   what `alive` may cost at most; a slower answer counts from the next call on
    note     gets a line when the container is out of sight, and when it is back
    """

    def __init__(
        self,
        spec: ServiceSpec,
        place: Place,
        *,
        grace_s: float = GRACE_S,
        wait_s: float = WAIT_S,
        note: Note = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.place = place
        self._grace_s = grace_s
        self._wait_s = wait_s
        self._note = note
        self._clock = clock
        self._url: str | None = None
        self._started_here = False
        self._look = _Background(self._inspect)
        self._looked_at: float | None = None
        self._found: Found | None = None
        self._gone = False
        self._trouble: str | None = None
        self._unknown_since: float | None = None
        self._noted = False

    @property
    def url(self) -> str:
        if self._url is None:
            self._url = self.place.link.forward(self.place.address, self.place.port)
        return self._url

    @property
    def log_path(self) -> Path | None:
        return None

    def start(self) -> None:
        """Start the container unless it runs. Raises JobFailed where there is none, HostUnreachable."""
        engine = self.place.link.engine()
        found = engine.find(self.place.container)
        if found is None:
            raise JobFailed(
                f"service {self.spec.label}: there is no container {self.place.container} on {self._host}",
                remedy="'ddtree deploy up' makes it",
            )
        if not found.running:
            engine.start(self.place.container)
            self._started_here = True
        self._url = self.place.link.forward(self.place.address, self.place.port)
        self._seen(engine.find(self.place.container))

    def alive(self) -> bool:
        """False once the container has ended, or its host was out of reach for longer than the grace."""
        self._refresh()
        if self._unknown_since is not None:
            return self._clock() - self._unknown_since < self._grace_s
        return not self._gone and (self._found is None or self._found.running)

    def exit_code(self) -> int | None:
        """Negative for a signal, as for a process; null while it runs, is gone, or nothing is known."""
        if self._unknown_since is not None or self._found is None or self._found.exit_code is None:
            return None
        code = self._found.exit_code
        return SIGNAL_BASE - code if code > SIGNAL_BASE else code

    def condition(self) -> str:
        """How the container stands, or why that is not known, in words."""
        where = f"container {self.place.container} on {self._host}"
        if self._unknown_since is not None:
            seconds = self._clock() - self._unknown_since
            return f"{where}: nothing is known for {seconds:.0f} s: {self._trouble}"
        if self._gone:
            return f"{where}: it is not there any more"
        return f"{where}: {self._found.outcome if self._found else 'not looked at yet'}"

    def death(self) -> str | None:
        """Why it counts as dead; null while it is alive."""
        return None if self.alive() else self.condition()

    def log_tail(self, lines: int = 20) -> str:
        """The end of its log; while the host is out of reach, a line that says so."""
        if self._unknown_since is not None:
            return self.condition()
        tail = _Background(lambda: self.place.link.engine().log_tail(self.place.container, lines))
        try:
            return tail.result(LOG_WAIT_S) or ""
        except DdtreeError as error:
            return error.message

    def stop(self) -> None:
        """Stop what `start` started; a container that ran before goes on."""
        if self._started_here:
            self._started_here = False
            self.place.link.engine().stop(self.place.container)

    @property
    def _host(self) -> str:
        return self.place.link.name

    def _refresh(self) -> None:
        """Look unless somebody just did. A look that hangs is waited for once, then passed by."""
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < FRESH_S:
            return
        try:
            answered = self._look.result(self._wait_s)
        except DdtreeError as error:
            self._lost(error.message)
            return
        if answered is None:
            self._slow()
        else:
            self._seen(answered.found)

    def _inspect(self) -> _Look:
        return _Look(self.place.link.engine().find(self.place.container))

    def _seen(self, found: Found | None) -> None:
        if self._noted:
            self._note(f"{self.spec.label}: {self._host} answers again")
        self._unknown_since, self._trouble, self._noted = None, None, False
        self._gone, self._found, self._looked_at = found is None, found or self._found, self._clock()

    def _slow(self) -> None:
        """No answer yet, which may be nothing: the clock of the grace runs, but nobody is told."""
        self._unknown_since = self._clock() if self._unknown_since is None else self._unknown_since
        self._trouble = self._trouble or "its engine has not answered yet"
        self._looked_at = self._clock()

    def _lost(self, why: str) -> None:
        self._slow()
        self._trouble = why
        if not self._noted:
            self._note(f"{self.spec.label}: {why}; it counts as alive for {self._grace_s:.0f} s")
        self._noted = True


class ContainerLauncher:
    """Makes services of containers that stand at known places.

    places  by the service's name in the sweep and the number of its replica
    """

    def __init__(
        self,
        places: Mapping[tuple[str, int], Place],
        *,
        grace_s: float = GRACE_S,
        note: Note = lambda text: None,
    ) -> None:
        self._places = dict(places)
        self._grace_s = grace_s
        self._note = note

    def create(self, spec: ServiceSpec) -> ContainerService:
        """Raises BadInput for a service without a container."""
        place = self._places.get((spec.name, spec.number))
        if place is None:
            known = sorted({name for name, _ in self._places})
            raise BadInput.at(file=None, key="services", found=spec.label, allowed=", ".join(known))
        return ContainerService(spec, place, grace_s=self._grace_s, note=self._note)


@dataclass(frozen=True)
class _Look:
    found: Found | None


T = TypeVar("T")


class _Background(Generic[T]):
    """A question that is asked in a thread, so that whoever wants the answer need not wait for it."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._done = threading.Event()
        self._running = False
        self._waited = False
        self._answer: T | None = None
        self._error: BaseException | None = None

    def result(self, wait_s: float) -> T | None:
        """Ask, or go on waiting for the last question; null when there is no answer in that time.

        An answer is handed out once. Raises what the question raised.
        """
        if not self._running:
            self._running, self._waited, self._answer, self._error = True, False, None, None
            self._done.clear()
            threading.Thread(target=self._ask, name="ddtree-container", daemon=True).start()
        if not self._done.wait(0 if self._waited else wait_s):
            self._waited = True
            return None
        self._running = False
        if self._error is not None:
            raise self._error
        return self._answer

    def _ask(self) -> None:
        try:
            self._answer = self._question()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
