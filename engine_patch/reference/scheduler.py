"""One worker thread that steps up to `max_running` requests in turn; the rest wait in a bounded queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree_engine.reference.engine import Emitted, Engine, RunningRequest, TokenLogprobs
from ddtree_engine.reference.errors import DrainingError, QueueFullError
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.text import OutputText, TextCodec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What a client may know after a step. Everything is cumulative; `finish` is set on the last one."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    running: RunningRequest | None
    finish: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """Requests, and the tokens of their prompts and outputs, at one moment."""

    running: int
    waiting: int
    used_tokens: int
    waiting_tokens: int


class Observer(Protocol):
    """Told about every request's life; the metrics live behind it."""

    def queued(self, waiting: int, running: int) -> None:
        """The numbers of waiting and running requests changed."""

    def tokens(self, ticket: Ticket, count: int, now: float) -> None:
        """A step put `count` tokens into a request's output."""

    def finished(self, ticket: Ticket, update: Update, now: float) -> None:
        """A request ended, for whatever reason."""


@dataclass(eq=False)
class Ticket:
    """A submitted request and the way back to its client. Times are seconds of the scheduler's clock."""

    request: GenerateRequest
    deliver: Callable[[Update], None]
    output: OutputText
    submitted: float
    running: RunningRequest | None = None
    first_token: float | None = None
    last_token: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cancelled: bool = False

    def cancel(self) -> None:
        """Ask the worker to drop the request at its next step."""
        self.cancelled = True


class Scheduler:
    """Bounded first-in first-out queue in front of a round-robin worker."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        observer: Observer,
        *,
        max_running: int,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.observer = observer
        self.max_running = max_running
        self.max_queue = max_queue
        self.clock = clock
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._changed = threading.Condition()
        self._draining = False
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes requests."""
        return self._thread.is_alive() and not self._draining

    def submit(self, request: GenerateRequest, deliver: Callable[[Update], None]) -> Ticket:
        """Queue a request; `deliver` is called from the worker thread.

        Raises `QueueFullError` past `max_queue` waiting requests and `DrainingError` during shutdown.
        """
        output = OutputText(self.codec, request.stop, request.skip_special_tokens, request.no_stop_trim)
        with self._changed:
            if self._draining:
                raise DrainingError
            free = self.max_running - len(self._running)
            if len(self._waiting) >= self.max_queue + max(0, free):
                raise QueueFullError
            ticket = Ticket(request, deliver, output, self.clock())
            self._waiting.append(ticket)
            self.observer.queued(len(self._waiting), len(self._running))
            self._changed.notify_all()
        return ticket

    def abort(self, rid: str | None) -> int:
        """Cancel the request with this id, or all of them for None; how many there were."""
        with self._changed:
            found = [t for t in [*self._running, *self._waiting] if rid is None or t.request.rid == rid]
            for ticket in found:
                ticket.cancel()
            self._changed.notify_all()
        return len(found)

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return not self._running and not self._waiting

    def load(self) -> Load:
        """How busy the engine is now."""
        with self._changed:
            running, waiting = list(self._running), list(self._waiting)
        used = sum(len(ticket.request.prompt_ids) + len(ticket.output.ids) for ticket in running)
        return Load(len(running), len(waiting), used, sum(len(t.request.prompt_ids) for t in waiting))

    def drain(self, seconds: float) -> bool:
        """Take no new requests, let the others end within `seconds`, else cancel; whether all ended."""
        deadline = self.clock() + seconds
        with self._changed:
            self._draining = True
            while (self._running or self._waiting) and self.clock() < deadline:
                self._changed.wait(timeout=max(0.01, min(1.0, deadline - self.clock())))
            left = len(self._running) + len(self._waiting)
        if left:
            log.warning("drain: cancelling %d unfinished request(s)", left)
            self.abort(None)
        return not left

    def stop(self) -> None:
        """End the worker; requests still there are cancelled."""
        with self._changed:
            self._draining = self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _work(self) -> None:
        while self._admit():
            for ticket in list(self._running):
                if self._advance(ticket):
                    with self._changed:
                        self._running.remove(ticket)
                        self.observer.queued(len(self._waiting), len(self._running))
                        self._changed.notify_all()

    def _admit(self) -> bool:
        """Wait for work and fill the running set; False when it is time to end."""
        with self._changed:
            while not self._running and not self._waiting and not self._stopped:
                self._changed.wait()
            if self._stopped:
                for ticket in [*self._running, *self._waiting]:
                    self._end(ticket, _aborted("the server is shutting down"))
                self._running.clear()
                self._waiting.clear()
                return False
            # A cancelled request must not wait for a free place.
            for ticket in [t for t in self._waiting if t.cancelled]:
                self._waiting.remove(ticket)
                self._end(ticket, _aborted())
            while self._waiting and len(self._running) < self.max_running:
                self._running.append(self._waiting.popleft())
            self.observer.queued(len(self._waiting), len(self._running))
            return True

    def _advance(self, ticket: Ticket) -> bool:
        """One prefill chunk or step; True when the request is over."""
        if ticket.cancelled:
            self._end(ticket, _aborted())
            return True
        try:
            if ticket.running is None:
                ticket.running = self.engine.start(ticket.request)
            emitted = self.engine.advance(ticket.running)
            finish = self._take(ticket, emitted)
        except Exception as error:
            log.exception("request %s failed", ticket.request.rid)
            self._end(ticket, None, error=f"{type(error).__name__}: {error}")
            return True
        if finish is not None:
            self._end(ticket, finish)
            return True
        if emitted.tokens and ticket.request.stream:
            ticket.deliver(_update(ticket))
        return False

    def _take(self, ticket: Ticket, emitted: Emitted) -> dict[str, Any] | None:
        """Put a step's tokens into the output one by one, up to where the request ends; the finish reason."""
        request, output = ticket.request, ticket.output
        before = len(output.ids)
        finish = None
        if request.max_new_tokens == 0 and ticket.running is not None and not ticket.running.in_prefill:
            finish = {"type": "length", "length": 0}
        for token in emitted.tokens:
            matched = output.push(token)
            if token in request.stop_ids:
                output.finish(drop_last=not request.no_stop_trim)
                finish = {"type": "stop", "matched": token}
            elif matched is not None:
                finish = {"type": "stop", "matched": matched}
            elif len(output.ids) == request.max_new_tokens:
                output.finish(drop_last=False)
                finish = {"type": "length", "length": len(output.ids)}
            if finish is not None:
                break
        added = len(output.ids) - before
        ticket.logprobs += emitted.logprobs[:added]
        if added:
            now = self.clock()
            self.observer.tokens(ticket, added, now)
            ticket.first_token = now if ticket.first_token is None else ticket.first_token
            ticket.last_token = now
        return finish

    def _end(self, ticket: Ticket, finish: dict[str, Any] | None, error: str | None = None) -> None:
        update = _update(ticket, finish, error)
        try:
            self.observer.finished(ticket, update, self.clock())
        except Exception:
            log.exception("request %s: its figures are lost", ticket.request.rid)
        ticket.deliver(update)


def _update(ticket: Ticket, finish: dict[str, Any] | None = None, error: str | None = None) -> Update:
    return Update(
        text=ticket.output.visible,
        output_ids=tuple(ticket.output.ids),
        logprobs=tuple(ticket.logprobs),
        prompt_logprobs=tuple(ticket.running.prompt_logprobs) if ticket.running else (),
        running=ticket.running,
        finish=finish,
        error=error,
    )


def _aborted(message: str = "Aborted") -> dict[str, Any]:
    return {"type": "abort", "message": message}
