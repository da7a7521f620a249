"""The real gateway in front of real engines, all on loopback: three CPU engines with the shipped pair."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ddtree_ops.gateway import entry_point
from ddtree_ops.gateway.check import GatewayState, gateway_state, wait_gateway
from ddtree_ops.gateway.render import smg_options
from ddtree_ops.schemas.gateway import Gateway
from ddtree_ops.services.local import free_port

KEY = "sesame-4711"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ROUTED = "x-smg-routed-worker-id"
START_SECONDS = 240
GOLDEN = {"text": "def parse(line):\n"}


@dataclass
class Process:
    """A server that can be killed and started again on its port."""

    argv: list[str]
    port: int
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    #: Whether coverage may run in it.
    measured: bool = True
    running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        env = {**os.environ, **self.env}
        if not self.measured:
            env = {name: value for name, value in env.items() if not name.startswith("COVERAGE_")}
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(self.argv, stdout=log, stderr=subprocess.STDOUT, env=env)

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()
        self.running.wait()

    def end(self) -> int:
        assert self.running is not None
        if self.running.poll() is None:
            self.running.terminate()
        try:
            return self.running.wait(150)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@dataclass
class Stack:
    """A gateway and its replicas."""

    gateway: Process
    metrics: str
    replicas: list[Process]

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def workers(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    def state(self) -> GatewayState:
        return gateway_state(self.url, self.metrics, self.workers)

    def wait_ready(self) -> GatewayState:
        return wait_gateway(
            self.url,
            self.metrics,
            self.workers,
            self.replicas[0].url,
            GOLDEN,
            headers=HEADERS,
            timeout_s=START_SECONDS,
        )


def engine(folder: Path, *options: str) -> Process:
    port = free_port()
    # Time to end what runs also on a slow machine, and no check of the engine: that has tests of its own.
    always = ["--port", str(port), "--threads", "1", "--self-check", "0", "--drain-seconds", "120"]
    argv = [sys.executable, "-m", "ddtree_engine.reference", *always, *options]
    env = {"OMP_NUM_THREADS": "1", "DDTREE_API_KEY": KEY}
    return Process(argv, port, folder / f"engine-{port}.log", env)


def gateway(folder: Path, workers: Sequence[str], settings: Gateway) -> Process:
    argv = [sys.executable, str(entry_point.__file__), *smg_options(settings, workers)]
    log = folder / f"gateway-{settings.port}.log"
    # On SIGTERM, coverage saves its figures and then ends the process by that signal: smg handles it in Rust,
    # on top of whatever handler Python has, so its orderly end would look like a crash.
    return Process(argv, settings.port, log, {"DDTREE_API_KEY": KEY}, measured=False)


def settings(**changes: object) -> Gateway:
    """A gateway on free ports that notices a dead replica within two seconds."""
    health = {"path": "/ready", "interval_s": 1, "timeout_s": 2, "failures": 2, "successes": 1}
    ports = {"port": free_port(), "metrics_port": free_port()}
    return Gateway.model_validate(
        {"name": "front", "service": "tree", "health": health, "stop_timeout_s": 20, **ports, **changes}
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("gateway")
    replicas = [engine(folder, "--arm", "ddtree", "--budget", "7", "--max-running", "4") for _ in range(3)]
    chosen = settings()
    front = gateway(folder, [replica.url for replica in replicas], chosen)
    made = Stack(front, f"http://127.0.0.1:{chosen.metrics_port}", replicas)
    try:
        for process in (*replicas, front):
            process.start()
        made.wait_ready()
        yield made
    finally:
        for process in (front, *replicas):
            if process.running is not None:
                process.kill()


def wait_for(holds, seconds: float = 150.0) -> None:
    """Patient, since machines that run many tests at once are slow; what holds is seen at once."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def client() -> httpx.Client:
    return httpx.Client(timeout=120, headers=HEADERS, trust_env=False)
