"""A host of one's own: this machine over `ansible_connection: local`, with a Docker engine of the tests."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli import app
from ddtree_ops.containers.engine import Engine
from tests.support.docker import Docker, require_docker, run_dockerd
from tests.support.python_image import import_double


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    require_docker()
    folder = Path(tempfile.mkdtemp(prefix="ddt-deploy-"))
    try:
        with run_dockerd(folder) as engine:
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def image(docker: Docker) -> str:
    with docker.link() as link:
        return import_double(link.engine())


Answer = tuple[int, dict[str, Any], list[dict[str, Any]]]


@dataclass
class Lab:
    """A cluster.yaml that tests change, and the command line on it."""

    file: Path
    engine: Engine
    data: dict[str, Any]
    capsys: pytest.CaptureFixture[str]

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in self.data["services"] if one["name"] == name)
        return found

    def run(self, *arguments: str) -> Answer:
        """Exit code, the last object (result or error), all objects of `ddtree deploy --json`."""
        self.file.write_text(yaml.safe_dump(self.data))
        self.capsys.readouterr()
        command, *rest = arguments
        code = app.run(["--json", "deploy", command, *rest, "--cluster", str(self.file)])
        lines = [json.loads(line) for line in self.capsys.readouterr().out.splitlines()]
        return code, lines[-1], lines

    def up(self, *arguments: str) -> Answer:
        return self.run("up", "--skip-provisioning", *arguments)

    def ids(self) -> dict[str, str]:
        return {one.name: one.id for one in self.engine.ours("lab")}


@pytest.fixture
def lab(
    docker: Docker, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], ports: Callable[[], int]
) -> Iterator[Lab]:
    host = {"vars": {"ansible_connection": "local", "ddtree_docker_socket": str(docker.socket)}}
    data = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"here": host}},
        "image": {"prebuilt": image},
        "deadlines": {"ready": 120},
        "monitoring": {"enabled": False},
        "services": [
            {"name": "plain", "arm": "ar", "port": ports(), "shm_gib": 1, "stop_timeout_s": 10},
            {"name": "tree", "arm": "ddtree", "budget": 31, "port": ports(), "shm_gib": 1},
        ],
    }
    with docker.link() as link:
        yield Lab(tmp_path / "cluster.yaml", link.engine(), data, capsys)
        for found in link.engine().ours("lab"):
            link.engine()._remove(found.id, force=True)


@pytest.fixture
def ports() -> Callable[[], int]:
    def free() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return free
