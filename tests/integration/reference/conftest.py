"""The engine as a real process on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.tiny_pair import write_pair

START_SECONDS = 120


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def command(pair: Path, *options: str) -> list[str]:
    models = ["--model", str(pair / "target"), "--drafter", str(pair / "drafter")]
    return [sys.executable, "-m", "ddtree_engine.reference", *models, *options]


@contextmanager
def process(pair: Path, *options: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A running engine on a free port and a client for it."""
    started = launch(pair, *options)
    try:
        with httpx.Client(base_url=address(started), timeout=60) as client:
            yield client, started
    finally:
        end(started)


def launch(pair: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(pair, "--port", "0", *options),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(started: subprocess.Popen[str]) -> None:
    if started.poll() is None:
        started.terminate()
    try:
        started.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()


def address(started: subprocess.Popen[str]) -> str:
    """The address from the engine's log; the rest of the log stays in the pipe for the test."""
    assert started.stderr is not None
    seen, deadline = [], time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        line = started.stderr.readline()
        seen.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            return found[1]
        if not line and started.poll() is not None:
            break
    raise AssertionError("the engine did not start:\n" + "".join(seen))


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[dict[str, httpx.Client]]:
    """All five arms, started together."""
    arms = {
        "ar": (),
        "dflash": (),
        "shadow": ("--budget", "31"),
        "ddtree": ("--budget", "31"),
        "unsafe": ("--budget", "31", "--allow-hybrid-unsafe"),
    }
    started = {arm: launch(tiny, "--arm", arm, *options) for arm, options in arms.items()}
    clients = {}
    try:
        for arm, running in started.items():
            clients[arm] = httpx.Client(base_url=address(running), timeout=60)
        yield clients
    finally:
        for client in clients.values():
            client.close()
        for running in started.values():
            running.terminate()
        for running in started.values():
            end(running)
