from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_ops.schemas.arms import Arm
from ddtree_ops.services.base import Identity, ServiceSpec
from ddtree_ops.services.external import ExternalService
from ddtree_ops.services.local import free_port
from ddtree_ops.services.readiness import NotReady, ServiceDied, require_alive_after_failure, wait_ready


def test_a_long_wait_says_what_it_waits_for() -> None:
    identity = Identity("reference", "1", "m", None, "float32", None, None, ())
    url = f"http://127.0.0.1:{free_port()}"
    service = ExternalService(ServiceSpec("ar", Arm.AR, None, identity, url=url))
    notes: list[str] = []
    clock = itertools.count(0, 3)

    async def sleep(_: float) -> None:
        await asyncio.sleep(0.01)

    waiting = wait_ready(
        service, {"text": "x"}, timeout_s=0.3, note=notes.append, clock=lambda: next(clock), sleep=sleep
    )
    with pytest.raises(NotReady, match=r"not ready after 0\.3 s: no answer \(ConnectError\)"):
        asyncio.run(waiting)
    assert notes[0] == f"ar: waiting for {url}/ready"
    assert any("still waiting after" in note and "no answer" in note for note in notes)


def test_a_service_that_is_not_ours_is_never_started_or_stopped() -> None:
    identity = Identity("reference", "1", "m", None, "float32", None, None, ())
    service = ExternalService(ServiceSpec("ar", Arm.AR, None, identity, url="http://h:1/"))
    service.start()
    service.stop()
    assert service.url == "http://h:1"
    assert service.alive()
    assert service.exit_code() is None
    assert (service.log_path, service.log_tail()) == (None, "")
    with pytest.raises(ValueError, match="needs its url"):
        ExternalService(ServiceSpec("ar", Arm.AR, None, identity))


@dataclass
class Dying:
    """A service whose process is seen alive for so many more looks."""

    looks: int
    spec: ServiceSpec
    url: str = "http://127.0.0.1:1"
    log_path: Path | None = None

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def alive(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def exit_code(self) -> int | None:
        return 7

    def log_tail(self, lines: int = 20) -> str:
        return ""


def _spec() -> ServiceSpec:
    identity = Identity("stub", "0", "a" * 64, None, "float32", None, None, ())
    return ServiceSpec(name="ar", arm=Arm.AR, budget=None, identity=identity)


def test_a_process_seen_dead_a_moment_after_its_connection_broke_is_dead() -> None:
    with pytest.raises(ServiceDied, match="exited with code 7"):
        asyncio.run(require_alive_after_failure(Dying(2, _spec())))


def test_a_service_that_lives_on_after_a_failed_request_is_not_called_dead() -> None:
    asyncio.run(require_alive_after_failure(Dying(1000, _spec())))
