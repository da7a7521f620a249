"""The order of things: arms in groups, their workloads, and what a failure may stop (nothing but itself)."""

from __future__ import annotations

import concurrent.futures
import time
import traceback
import urllib.error
from collections.abc import Callable
from typing import Any

from engine import diagnosis
from engine.arms import ARMS, argv_of
from engine.host import Context
from engine.judgement import ask_about_ties, judge
from engine.servers import START_LIMIT, Server, cause
from engine.step_times import STEP_ARMS, STEP_WY_ARMS, step_times
from engine.workloads import WORKLOADS

# A group that cannot be served in the time left is not started.
GROUP_SECONDS = 150


class Run:
    """One plan in the works: its servers' ports, what failed, and the reference that answers about ties."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.failures: list[str] = []
        # Arm -> one line on why its server ended or never became ready.
        self.broken: dict[str, str] = {}
        self.looked_into: set[str] = set()
        self.reference: Server | None = None
        self._port = 30100

    def all(self, work: dict[str, list[str]], extra: list[str], *, diagnose: bool) -> list[str]:
        """Arms in groups, diagnoses of those that broke, ties and the other stages; returns what failed."""
        try:
            for group in groups_of(list(work), self.context.options.parallel):
                self._guarded(" ".join(group), self._group, group, work)
                self._guarded("saving", self.context.save)
                if diagnose:
                    self._guarded("diagnosis", self._diagnose)
            if self.reference is not None:
                self._guarded("ties", self._ties)
        finally:
            if self.reference is not None:
                self.reference.stop()
        self._guarded("judgement", judge, self.context)
        for stage in extra:
            arms = {"step": STEP_ARMS, "step-wy": STEP_WY_ARMS}[stage]
            self.failures += self._guarded(stage, step_times, self.context, arms) or []
        return self.failures

    def port(self) -> int:
        """A port that no other server of this plan had."""
        self._port += 7
        return self._port

    def _guarded(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the plan; what it raises is told and counted, and the plan goes on."""
        try:
            return action(*arguments)
        except Exception as error:
            print(f"{what}: FAILED {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
            self.failures.append(what)
            return None

    def _group(self, group: list[str], work: dict[str, list[str]]) -> None:
        if self.context.seconds_left() < GROUP_SECONDS:
            self.context.left_over += group
            return
        servers = []
        try:
            for name in group:
                port = self.port()
                argv = argv_of(self.context.pair_of(ARMS[name]), ARMS[name], port)
                servers.append(Server(self.context, name, ARMS[name], port, argv))
            # Side by side: a server that waits for its turn holds up the next group.
            with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
                found = [pool.submit(self._serve, server, work[server.name]) for server in servers]
            for server, future in zip(servers, found, strict=True):
                self._guarded(server.name, self._served, server, future.result)
        finally:
            for server in servers:
                if server is not self.reference:
                    server.stop()

    def _serve(self, server: Server, workloads: list[str]) -> list[str]:
        """Give a server its workloads; what failed. Plain decoding goes on: it may be the reference."""
        failed = serve(self.context, server, workloads)
        dead = bool(failed) and (server.ended or server.ready_after is None)
        if dead:
            self.broken[server.name] = cause(server.log.read_text(errors="replace"))
        if dead or not server.name.startswith("ar"):
            server.stop()
        self.context.save()
        return failed

    def _served(self, server: Server, failed: Callable[[], list[str]]) -> None:
        self.failures += failed()
        if not server.ended and self.reference is None:
            self.reference = server

    def _diagnose(self) -> None:
        """Look into causes not seen before, at once: what the next arms would only run into again."""
        news = {name: cause for name, cause in self.broken.items() if cause not in self.looked_into}
        self.looked_into |= set(news.values())
        if news:
            diagnosis.diagnose(self.context, news, self.port)

    def _ties(self) -> None:
        assert self.reference is not None
        questions = ask_about_ties(self.context, self.reference)
        self.context.keep(self.context.judge, "differences", questions)


def groups_of(names: list[str], parallel: int) -> list[list[str]]:
    """The first server alone: it fills the caches of compiled kernels that the others then find."""
    rest = names[1:]
    return [names[:1]] * bool(names) + [rest[i : i + parallel] for i in range(0, len(rest), parallel)]


def serve(context: Context, server: Server, workloads: list[str]) -> list[str]:
    """Wait for a server and give it its workloads; what failed, as `arm` or `arm.workload`."""
    limit = min(START_LIMIT, max(30.0, context.seconds_left() - 20))
    if not server.wait(limit):
        how = "ended" if server.ended else f"gave no answer for {limit:.0f} s"
        print(f"{server.name}: NOT READY, {how}\n{server.why()}", flush=True)
        return [server.name]
    print(f"{server.name}: ready after {server.ready_after:.0f} s", flush=True)
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
