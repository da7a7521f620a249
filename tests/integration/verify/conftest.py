from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree_ops.cli.app import run
from ddtree_ops.schemas.acceptance import AcceptanceSummary
from ddtree_ops.services.local import free_port
from tests.support.ops import ROOT, STUB, write_checkpoint

MANGLED = [sys.executable, str(ROOT / "tests" / "support" / "mangled_engine.py")]
START_S = 240.0


class Bundle:
    """A bundle's files by name, and its summary."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            entries = tar.getmembers()
            self.files = {entry.name: tar.extractfile(entry).read() for entry in entries}  # type: ignore[union-attr]
        self.summary = AcceptanceSummary.model_validate_json(self.files["ddtree-acceptance/summary.json"])

    def failed(self, service: str) -> set[str]:
        """Ids of the gates that fail on a service."""
        found = [gate for gate in self.summary.gates if gate.service == service]
        assert found, f"no gate on {service}"
        return {gate.id.value for gate in found if gate.status == "fail"}


class Verifier:
    """Runs `ddtree verify` in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = folder / "bundle.tar.gz"
        self._capsys = capsys
        self.events: list[dict[str, Any]] = []

    def __call__(self, *options: str) -> int:
        code = run(["verify", "--json", "--out", str(self.out), *options])
        self.events = [json.loads(line) for line in self._capsys.readouterr().out.splitlines()]
        return code

    @property
    def bundle(self) -> Bundle:
        return Bundle(self.out)

    @property
    def error(self) -> str:
        return str(next(event["message"] for event in self.events if event["event"] == "error"))


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verifier:
    return Verifier(tmp_path, capsys)


Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers without waiting for them; returns their addresses. `ready` waits for all."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(argv: list[str], *options: str) -> str:
        port = free_port()
        launch([*argv, *options, "--port", str(port)])
        return f"http://127.0.0.1:{port}"

    def launch(argv: list[str]) -> None:
        with (tmp_path / f"server-{len(running)}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    argv,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            )

    begin.launch = launch  # type: ignore[attr-defined]
    yield begin
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def mangled(start: Start) -> Callable[..., list[str]]:
    """Start engines with faults, ready: `mangled("leak", "none --arm dflash")` gives their addresses."""

    def begin(*wishes: str) -> list[str]:
        ports = [free_port() for _ in wishes]
        start.launch(  # type: ignore[attr-defined]
            [*MANGLED, *(f"{wish} --port {port}" for wish, port in zip(wishes, ports, strict=True))]
        )
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        ready(*urls)
        return urls

    return begin


def ready(*urls: str) -> None:
    """Wait until all servers answer."""
    deadline = time.monotonic() + START_S
    for url in urls:
        while not _answers(url):
            assert time.monotonic() < deadline, f"{url} did not start"
            time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def stub(tmp_path: Path, start: Start) -> Start:
    """A stub server of an arm, ready; it knows no self-check."""
    model, drafter = write_checkpoint(tmp_path / "t"), write_checkpoint(tmp_path / "d", b"draft")

    def begin(arm: str, *options: str) -> str:
        url = start(STUB, "--arm", arm, "--model", str(model), "--drafter", str(drafter), *options)
        ready(url)
        return url

    return begin
