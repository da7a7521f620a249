"""Looks at the GPUs of hosts during a sweep: one nvidia-smi on each host, through the link that is there.

It prints for as long as somebody reads: when this side ends, the next line ends it over there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.errors import DdtreeError
from ddtree_ops.services.cards import CardSample, parse_sample, query

PERIOD_MS = 500
#: After this long a host whose nvidia-smi has ended is asked again.
AGAIN_S = 5.0
END_S = 5.0


class CardWatch:
    """Samples of all cards of some hosts, a thread a host. Losing a host loses samples, never the sweep."""

    def __init__(
        self,
        links: Mapping[str, HostLink],
        *,
        period_ms: int = PERIOD_MS,
        again_s: float = AGAIN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._links = dict(links)
        self._period_ms = period_ms
        self._again_s = again_s
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, list[CardSample]] = defaultdict(list)
        self._troubles: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def start(self) -> None:
        if self._threads:
            return
        for host in self._links:
            thread = threading.Thread(
                target=self._watch, args=(host,), name=f"ddtree-cards-{host}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End all; a host that does not let go of its process within seconds is left to itself."""
        self._ended.set()
        with self._lock:
            running = list(self._running.values())
        for process in running:
            _end(process)
        for thread in self._threads:
            thread.join(END_S)

    def samples(self) -> Mapping[str, Sequence[CardSample]]:
        with self._lock:
            return {gpu: list(some) for gpu, some in self._found.items()}

    def trouble(self, host: str) -> str | None:
        with self._lock:
            return self._troubles.get(host)

    def _watch(self, host: str) -> None:
        while not self._ended.is_set():
            try:
                why = self._follow(host)
            except DdtreeError as error:
                why = error.message
            except OSError as error:
                why = str(error)
            with self._lock:
                self._troubles[host] = why
            self._ended.wait(self._again_s)

    def _follow(self, host: str) -> str:
        """Read until nvidia-smi ends; why it did. A lost link is for others to make again."""
        link = self._links[host]
        if not link.alive():
            return "the host does not answer"
        process = link.stream(query(self._period_ms))
        with self._lock:
            self._running[host] = process
        if self._ended.is_set():  # stopped while it was starting
            _end(process)
        last = ""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                sample = parse_sample(line, host=host, at=self._clock())
                with self._lock:
                    if sample is None:
                        last = line.strip() or last
                    else:
                        self._troubles.pop(host, None)
                        self._found[sample.gpu].append(sample)
        return last or f"nvidia-smi ended with code {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """The whole group: a wrapper's child would hold the pipe open."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
