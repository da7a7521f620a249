"""The order of things: which arms are served when, and what a failure may stop (nothing but itself)."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import traceback
import urllib.error
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine import diagnosis, step_parts
from engine.arms import ARMS, argv_of
from engine.host import Context, read_answers
from engine.judgement import COMPARED, REFEREES, ask_about_ties, judge
from engine.servers import START_LIMIT, Server, cause
from engine.workloads import WORKLOADS

# An arm that cannot be served in the time left is not started.
ARM_SECONDS = 150
# The workload that lasts as long as it is told to: its arms start first, and others are served meanwhile.
LASTING = "load"


class Run:
    """One plan in the works: its servers' ports, what failed, and the references that answer about ties."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.failures: list[str] = []
        # Arm -> one line on why its server ended or never became ready.
        self.broken: dict[str, str] = {}
        # Arms of plain decoding that are still up.
        self.references: dict[str, Server] = {}
        self._servers: list[Server] = []
        self._ports = iter(range(30107, 32000, 7))
        self._first = threading.Event()

    def all(self, work: dict[str, list[str]], extra: list[str], *, diagnose: bool) -> list[str]:
        """Arms side by side, a diagnosis of those that broke, ties and the other stages; what failed."""
        profiled: Server | None = None
        lasting = [name for name, workloads in work.items() if LASTING in workloads]
        pool = concurrent.futures.ThreadPoolExecutor(max(self.context.options.parallel, len(lasting) + 1))
        try:
            first = [*[name for name in work if name not in lasting][:1], *lasting]
            jobs = {name: pool.submit(self._arm, name, work[name]) for name in first}
            # The first servers fill the caches of compiled kernels that others then find; where all may be
            # up at once, waiting for that takes longer than compiling in each.
            if len(work) > self.context.options.parallel:
                self._first.wait()
            jobs |= {name: pool.submit(self._arm, name, work[name]) for name in work if name not in jobs}
            self._collect(jobs, [name for name in work if name not in lasting])
            if "profile" in extra:
                profiled = self._guarded("profile", step_parts.start, self.context)
            self._collect(jobs, lasting)
            if diagnose:
                # In the plan's order, whichever broke first.
                broken = {name: self.broken[name] for name in work if name in self.broken}
                self._guarded("diagnosis", diagnosis.diagnose, self.context, broken, self.port)
            if self.references:
                self._guarded("ties", self._ties)
            self._guarded("judgement", judge, self.context)
            self._stop()
            if profiled is not None:
                self._guarded("profile", step_parts.measure, self.context, profiled)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
            if profiled is not None:
                profiled.stop()
        return self.failures

    def port(self) -> int:
        """A port that no other server of this plan had."""
        return next(self._ports)

    def _guarded(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the plan; what it raises is told and counted, and the plan goes on."""
        try:
            return action(*arguments)
        except Exception as error:
            print(f"{what}: FAILED {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
            self.failures.append(what)
            return None

    def _collect(self, jobs: dict[str, concurrent.futures.Future[list[str]]], names: Iterable[str]) -> None:
        for name in names:
            self.failures += self._guarded(name, jobs[name].result) or []

    def _arm(self, name: str, workloads: list[str]) -> list[str]:
        """Start an arm's server and give it its workloads; what failed. A referee goes on running."""
        if self.context.seconds_left() < ARM_SECONDS:
            self.context.left_over.append(name)
            return []
        port = self.port()
        argv = argv_of(self.context.pair_of(ARMS[name]), ARMS[name], port)
        server = Server(self.context, name, ARMS[name], port, argv)
        self._servers.append(server)
        try:
            failed = serve(self.context, server, workloads, self._first.set)
            if failed and (server.ended or server.ready_after is None):
                self.broken[name] = cause(server.log.read_text(errors="replace"))
            elif name in REFEREES:
                self.references[name] = server
        finally:
            self._first.set()
            if name not in self.references:
                server.stop()
        self.context.save()
        return failed

    def _ties(self) -> None:
        if self.context.options.earlier is not None:
            self._remember(self.context.options.earlier)
        questions = ask_about_ties(self.context, self.references)
        self.context.keep(self.context.judge, "differences", questions)

    def _remember(self, archive: Path) -> None:
        """Answers of an earlier run, where this one has none: the referees are asked about them too."""
        answers = read_answers(archive, ("prompts", *COMPARED))
        if answers.pop("host")["prompts"] != self.context.prompts:
            raise ValueError(f"{archive} holds answers to other prompts")
        for arm, runs in answers.items():
            self.context.results[arm] = runs | self.context.results.get(arm, {})

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()


def serve(
    context: Context, server: Server, workloads: list[str], ready: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait for a server and give it its workloads; what failed, as `arm` or `arm.workload`."""
    limit = min(START_LIMIT, max(30.0, context.seconds_left() - 20))
    if not server.wait(limit):
        how = "ended" if server.ended else f"gave no answer for {limit:.0f} s"
        print(f"{server.name}: NOT READY, {how}\n{server.why()}", flush=True)
        return [server.name]
    print(f"{server.name}: ready after {server.ready_after:.0f} s", flush=True)
    ready()
    failures = []
    for workload in workloads:
        began = time.monotonic()
        try:
            context.keep(server.name, workload, WORKLOADS[workload](context, server))
            print(f"  {server.name}.{workload}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:  # a workload that breaks must not take the plan with it
            body = error.read().decode()[:500] if isinstance(error, urllib.error.HTTPError) else ""
            print(f"  {server.name}.{workload}: FAILED {type(error).__name__}: {error} {body}", flush=True)
            print(server.why(), flush=True)
            failures.append(f"{server.name}.{workload}")
            if server.ended:
                break
    return failures
