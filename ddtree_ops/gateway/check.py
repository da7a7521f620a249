"""What a running gateway knows of its replicas, and whether it may be used.

smg's control plane is closed (see entry_point.py), so this comes from `/readiness` and from its Prometheus
metrics, which name every replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import tenacity
from prometheus_client.parser import text_string_to_metric_families

from ddtree_ops.errors import JobFailed

PROBE_TIMEOUT_S = 5.0
GOLDEN_TIMEOUT_S = 120.0
GOLDEN_TOKENS = 8
GOLDEN_TRIES = 3
TICK_S = 0.5
HEALTH, ACTIVE, BREAKER = "smg_worker_health", "smg_worker_requests_active", "smg_worker_cb_state"
DONE = "smg_worker_requests_total"
#: smg's circuit breaker, by the number in its metric.
BREAKERS = {0: "closed", 1: "open", 2: "half open"}

Note = Callable[[str], None]


class GatewayNotReady(JobFailed):
    """A gateway that lives but must not be used."""


@dataclass(frozen=True)
class WorkerState:
    """A replica as the gateway has it.

    running  requests that it has there now
    sent     requests that it has sent there since it started
    breaker  `open` where failures in a row keep requests away
    """

    url: str
    healthy: bool
    running: int = 0
    sent: int = 0
    breaker: str = "closed"

    @property
    def usable(self) -> bool:
        return self.healthy and self.breaker != "open"


@dataclass(frozen=True)
class GatewayState:
    """answers  whether `/readiness` said yes; workers  in the order of the expected ones, then others."""

    answers: bool
    workers: tuple[WorkerState, ...]
    problems: tuple[str, ...]

    @property
    def summary(self) -> str:
        """One cell of a table."""
        usable = sum(worker.usable for worker in self.workers)
        running = sum(worker.running for worker in self.workers)
        return f"{usable} of {len(self.workers)} replicas, {running} running"


def gateway_state(
    url: str, metrics_url: str, expected: Sequence[str], tolerated: Sequence[str] = ()
) -> GatewayState:
    """Ask a gateway.

    url, metrics_url  base addresses as seen from here, without a slash at the end
    expected          the replicas' base addresses as the gateway was given them
    tolerated         those of them that may be missing or unhealthy
    A gateway that does not answer is a state with a problem, not an error.
    """
    with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
        answers, said = _readiness(http, url)
        try:
            workers = parse_workers(http.get(f"{metrics_url}/metrics").raise_for_status().text)
        except (httpx.HTTPError, ValueError) as error:
            return GatewayState(answers, (), (f"{metrics_url}/metrics: {_brief(error)}", *said))
    ordered = [workers.pop(one) for one in expected if one in workers]
    missing = [one for one in expected if one not in {worker.url for worker in ordered}]
    problems = [
        *said,
        *(f"{one}: not known to the gateway" for one in missing if one not in tolerated),
        *(f"{worker.url}: not in cluster.yaml" for worker in workers.values()),
        *(
            f"{worker.url}: {_trouble(worker)}"
            for worker in ordered
            if not worker.usable and worker.url not in tolerated
        ),
    ]
    return GatewayState(answers, (*ordered, *workers.values()), tuple(problems))


def parse_workers(metrics: str) -> dict[str, WorkerState]:
    """Replicas by address from smg's metrics. Raises ValueError for text that is none."""
    figures: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            url = sample.labels.get("worker")
            if url is not None and sample.name in {HEALTH, ACTIVE, BREAKER, DONE}:
                found = figures.setdefault(url, {})
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return {
        url: WorkerState(
            url,
            healthy=found[HEALTH] == 1,
            running=int(found.get(ACTIVE, 0)),
            sent=int(found.get(DONE, 0)),
            breaker=BREAKERS.get(int(found.get(BREAKER, 0)), "unknown"),
        )
        for url, found in figures.items()
        if HEALTH in found
    }


def wait_gateway(
    url: str,
    metrics_url: str,
    expected: Sequence[str],
    replica_url: str,
    golden: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    tolerated: Sequence[str] = (),
    timeout_s: float,
    require_alive: Callable[[], None] = lambda: None,
    note: Note = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GatewayState:
    """Wait until the gateway has all its replicas and answers as one of them does.

    replica_url    a replica's base address as seen from here
    golden         the prompt part of a `/generate` request
    headers        with the API key, where there is one
    tolerated      replicas that are not waited for
    require_alive  raises when the gateway's container is gone
    Raises GatewayNotReady with what is wrong.
    """
    state = GatewayState(False, (), ("no answer yet",))

    def tick() -> bool:
        nonlocal state
        require_alive()
        if state.problems:
            note(f"{url}: {state.problems[0]}")
        state = gateway_state(url, metrics_url, expected, tolerated)
        return state.answers and not state.problems

    waiting = tenacity.Retrying(
        stop=lambda _: clock() >= ends,
        wait=tenacity.wait_fixed(TICK_S),
        retry=tenacity.retry_if_result(lambda ready: not ready),
        sleep=sleep,
    )
    ends = clock() + timeout_s
    try:
        waiting(tick)
    except tenacity.RetryError:
        raise GatewayNotReady(
            f"gateway {url} was not ready after {timeout_s:g} s: {'; '.join(state.problems)}",
            remedy="see its log, and `ddtree deploy status` for the replicas",
        ) from None
    check_golden(url, replica_url, golden, headers or {})
    return state


def check_golden(
    url: str, replica_url: str, golden: Mapping[str, Any], headers: Mapping[str, str]
) -> list[int]:
    """The same greedy prompt through the gateway and at a replica must give the same tokens, and some.

    With a key, the gateway must also refuse a request without one. Tried a few times: beside other requests
    a near-tie may fall the other way. Returns the tokens; raises GatewayNotReady.
    """
    request = {
        **golden,
        "sampling_params": {"temperature": 0, "max_new_tokens": GOLDEN_TOKENS, "ignore_eos": True},
    }
    with httpx.Client(timeout=GOLDEN_TIMEOUT_S, trust_env=False) as http:
        if headers:
            refused = _post(http, url, request, {}).status_code
            if refused != httpx.codes.UNAUTHORIZED:
                raise GatewayNotReady(f"gateway {url}: /generate without the API key: {refused}, not 401")
        for _ in range(GOLDEN_TRIES):
            through, direct = (_tokens(http, base, request, headers) for base in (url, replica_url))
            if through == direct:
                return through
    raise GatewayNotReady(
        f"gateway {url}: the golden prompt gives {through}, and {direct} at {replica_url}",
        remedy="the replicas are not alike: see `ddtree deploy status` and `ddtree deploy verify`",
    )


def _tokens(
    http: httpx.Client, base: str, request: Mapping[str, Any], headers: Mapping[str, str]
) -> list[int]:
    try:
        found = _post(http, base, request, headers).raise_for_status().json().get("output_ids")
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise GatewayNotReady(f"{base}/generate: {_brief(error)}") from error
    if not isinstance(found, list) or not found:
        raise GatewayNotReady(f"{base}/generate: found no output_ids")
    return found


def _post(
    http: httpx.Client, base: str, request: Mapping[str, Any], headers: Mapping[str, str]
) -> httpx.Response:
    try:
        return http.post(f"{base}/generate", json=request, headers=dict(headers))
    except httpx.HTTPError as error:
        raise GatewayNotReady(f"{base}/generate: {_brief(error)}") from error


def _readiness(http: httpx.Client, url: str) -> tuple[bool, Iterable[str]]:
    try:
        answer = http.get(f"{url}/readiness")
    except httpx.HTTPError as error:
        return False, (f"{url}/readiness: {_brief(error)}",)
    if answer.status_code == httpx.codes.OK:
        return True, ()
    return False, (f"{url}/readiness: {answer.status_code}, no healthy replica",)


def _trouble(worker: WorkerState) -> str:
    return "unhealthy, gets no requests" if not worker.healthy else "its circuit breaker is open"


def _brief(error: Exception) -> str:
    return str(error) or type(error).__name__
