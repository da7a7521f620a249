from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ddtree_ops.bench.store import Store
from ddtree_ops.cli.app import run
from ddtree_ops.schemas.results import CellRecord
from ddtree_ops.services.local import free_port
from tests.support.ops import STUB, write_checkpoint


class Sweeper:
    """Runs `ddtree bench sweep` in this process and reads what it leaves behind."""

    def __init__(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.results = results
        self._capsys = capsys
        self.code = -1
        self.events: list[dict[str, Any]] = []

    def __call__(self, sweep: Path, *options: str) -> int:
        self.code = run(["bench", "sweep", str(sweep), "--results", str(self.results), "--json", *options])
        self.events = [json.loads(line) for line in self._capsys.readouterr().out.splitlines()]
        return self.code

    @property
    def store(self) -> Store:
        return Store.open(self.results)

    def cells(self) -> dict[str, CellRecord]:
        """Sealed cells by arm, budget and whatever the name holds."""
        event = next(event for event in reversed(self.events) if event["event"] == "result")
        found = [self.store.cell(cell["key"]) for cell in event["cells"]]
        return {cell["name"]: record for cell, record in zip(event["cells"], found, strict=True) if record}

    def error(self) -> str:
        return next(event["message"] for event in self.events if event["event"] == "error")


@pytest.fixture
def sweeper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweeper:
    return Sweeper(tmp_path / "results", capsys)


@pytest.fixture(autouse=True)
def no_service_is_left() -> Iterator[None]:
    """Every test of this folder must leave no server behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    alive = [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"left running: {[child.cmdline() for child in alive]}"


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait until something is so, with a deadline."""
    import time

    def wait(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.05)

    return wait


Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path, wait_for: Callable[..., None]) -> Iterator[Serve]:
    """Start stub servers by hand; returns their addresses."""
    running: list[subprocess.Popen[bytes]] = []
    model, drafter = write_checkpoint(tmp_path / "t"), write_checkpoint(tmp_path / "d", b"draft")

    def start(arm: str, *options: str) -> str:
        port = free_port()
        argv = [*STUB, "--arm", arm, "--port", str(port), "--model", str(model), "--drafter", str(drafter)]
        running.append(subprocess.Popen([*argv, *options], stdout=subprocess.DEVNULL))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(url), f"{arm} to answer")
        return url

    yield start
    for process in running:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False
