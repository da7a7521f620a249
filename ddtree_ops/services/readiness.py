"""When a service may be measured: alive, ready, generating, and started as asked.

"Up" is not "ready" is not "correct": `/ready` must answer 200, `/server_info` must say what was asked for,
and a golden prompt must give the same tokens twice. A process that exits ends the wait at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import tenacity

from ddtree_ops.errors import JobFailed
from ddtree_ops.redact import allowed_server_info, redact_text
from ddtree_ops.services.base import Explained, Service, ServiceSpec

TICK_S = 0.2
NOTE_EVERY_S = 5.0
#: How long a process may take from closing its connections to being seen as dead.
DYING_S = 0.5
PROBE_TIMEOUT_S = 5.0
GOLDEN_TOKENS = 8
GOLDEN_TIMEOUT_S = 120.0
#: Wherever a server says that it makes acceptance up (SGLANG_SIMULATE_ACC_LEN and its like).
SIMULATED = "simulate_acc"

Note = Callable[[str], None]


class ServiceDied(JobFailed):
    """The process of a service ended by itself."""


class NotReady(JobFailed):
    """A service that lives but cannot be measured."""


async def wait_ready(
    service: Service,
    golden: Mapping[str, Any],
    *,
    timeout_s: float,
    note: Note = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> dict[str, Any]:
    """Wait until the service may be measured and return the storable part of its `/server_info`.

    golden  the prompt part of a `/generate` request: `{"text": ...}` or `{"input_ids": ...}`
    Raises ServiceDied, NotReady.
    """
    name = service.spec.label
    options: dict[str, Any] = {
        "timeout": PROBE_TIMEOUT_S,
        "trust_env": False,
        "headers": service.spec.headers,
    }
    async with httpx.AsyncClient(base_url=service.url, **options) as http:
        started = clock()
        note(f"{name}: waiting for {service.url}/ready")
        await _until_ready(service, http, timeout_s, note, clock, sleep)
        info = await _server_info(service, http)
        check_arguments(service, info)
        await _check_golden(service, http, golden)
        note(f"{name}: ready after {clock() - started:.1f} s at {service.url}")
        return allowed_server_info(info)


def require_alive(service: Service) -> None:
    """Raise ServiceDied, with the exit code and the end of the log, when the process is gone."""
    if service.alive():
        return
    raise ServiceDied(f"service {service.spec.label} {_death(service)}{_log(service)}")


async def require_alive_after_failure(service: Service) -> None:
    """Like :func:`require_alive`, after a request that failed.

    A dying process closes its connections a moment before it can be seen to be dead; that moment is waited.
    """
    waited = 0.0
    while service.alive() and waited < DYING_S:
        await asyncio.sleep(TICK_S / 4)
        waited += TICK_S / 4
    require_alive(service)


def _death(service: Service) -> str:
    reason = service.death() if isinstance(service, Explained) else None
    if reason is not None:
        return f"is dead: {reason}"
    code = service.exit_code()
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"


def _log(service: Service) -> str:
    tail = redact_text(service.log_tail())
    return f"; the end of {service.log_path or 'its log'}:\n{tail}" if tail else ""


def check_arguments(service: Service, info: Mapping[str, Any]) -> None:
    """Raise NotReady unless the server runs as asked and measures for real."""
    wrong = not_as_asked(service.spec, info)
    if wrong:
        raise NotReady(f"service {service.spec.label} at {service.url}: {wrong}")


def not_as_asked(spec: ServiceSpec, info: Mapping[str, Any]) -> str | None:
    """Why a server that says this of itself is not the one that was asked for, in words; null where it is."""
    return (
        argument_mismatch(spec.expected, info)
        or _top_level_mismatch(spec.arguments, info)
        or simulated_acceptance(info)
    )


def _top_level_mismatch(arguments: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    for key, value in arguments.items():
        if info.get(key) != value:
            return f"/server_info: {key}: found {info.get(key)!r}, asked for {value!r}"
    return None


def argument_mismatch(expected: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    """The first field of `/server_info`'s `ddtree` block that is not as expected, in words."""
    block = info.get("ddtree")
    found = block if isinstance(block, Mapping) else {}
    for key, value in expected.items():
        if found.get(key) != value:
            return f"/server_info: ddtree.{key}: found {found.get(key)!r}, asked for {value!r}"
    return None


def simulated_acceptance(info: Any, where: str = "/server_info") -> str | None:
    """Where a server admits that its acceptance is made up, in words; such a run is not a result."""
    if isinstance(info, Mapping):
        for key, value in info.items():
            if SIMULATED in str(key).lower() and value not in (None, "", 0, "0", -1, -1.0, "-1", False):
                return f"{where}: {key}={value!r}: simulated acceptance is not a result"
            inner = simulated_acceptance(value, where)
            if inner:
                return inner
    elif isinstance(info, list):
        for value in info:
            inner = simulated_acceptance(value, where)
            if inner:
                return inner
    elif isinstance(info, str) and f"{SIMULATED}_len=" in info.lower():
        return f"{where}: simulated acceptance in its command line is not a result"
    return None


async def _until_ready(
    service: Service,
    http: httpx.AsyncClient,
    timeout_s: float,
    note: Note,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    seen, started, noted = "no answer yet", clock(), clock()

    async def tick() -> bool:
        nonlocal seen, noted
        require_alive(service)
        if clock() - noted >= NOTE_EVERY_S:
            noted = clock()
            note(f"{service.spec.label}: still waiting after {noted - started:.0f} s: {seen}")
        try:
            answer = await http.get("/ready")
        except httpx.HTTPError as error:
            seen = f"no answer ({type(error).__name__})"
            return False
        seen = f"/ready answers {answer.status_code}"
        return answer.status_code == httpx.codes.OK

    waiting = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(TICK_S) + tenacity.wait_random(0, TICK_S / 4),
        retry=tenacity.retry_if_result(lambda ready: not ready),
        sleep=sleep,
    )
    try:
        await waiting(tick)
    except tenacity.RetryError:
        raise NotReady(
            f"service {service.spec.label} was not ready after {timeout_s:g} s: {seen}{_log(service)}",
            remedy="give it longer with start_timeout_s, or read its log",
        ) from None


async def _server_info(service: Service, http: httpx.AsyncClient) -> Mapping[str, Any]:
    try:
        answer = await http.get("/server_info")
        info = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        await require_alive_after_failure(service)
        raise NotReady(f"service {service.spec.label}: /server_info: {error}") from error
    if not isinstance(info, Mapping):
        raise NotReady(f"service {service.spec.label}: /server_info is no JSON object")
    return info


async def _check_golden(service: Service, http: httpx.AsyncClient, golden: Mapping[str, Any]) -> None:
    """The same greedy prompt twice must give the same tokens, and some."""
    request = {
        **golden,
        "sampling_params": {"max_new_tokens": GOLDEN_TOKENS, "temperature": 0.0, "ignore_eos": True},
    }
    outputs = []
    for _ in range(2):
        try:
            answer = await http.post("/generate", json=request, timeout=GOLDEN_TIMEOUT_S)
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {answer.status_code}: {answer.text[:300]}")
            outputs.append(answer.json()["output_ids"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            await require_alive_after_failure(service)
            raise NotReady(
                f"service {service.spec.label}: golden prompt: {error!r}{_log(service)}"
            ) from error
    if not outputs[0]:
        raise NotReady(f"service {service.spec.label}: golden prompt: an empty answer")
    if outputs[0] != outputs[1]:
        raise NotReady(
            f"service {service.spec.label}: golden prompt: greedy answers differ: {outputs[0]}, {outputs[1]}",
            remedy="turn off what makes the server nondeterministic (kernel autotuning, dynamic batching)",
        )
