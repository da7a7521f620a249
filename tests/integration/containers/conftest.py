"""A Docker engine here, and one behind a real sshd."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.engine import Engine
from tests.support.docker import CLUSTER, Docker, require_docker, run_dockerd
from tests.support.ssh_host import NetnsHost, run_sshd


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """An engine of this process. Its folder has a short name, for the sake of its sockets."""
    require_docker()
    folder = Path(tempfile.mkdtemp(prefix="ddt-docker-"))
    try:
        with run_dockerd(folder) as engine:
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(docker: Docker) -> Iterator[Engine]:
    """The engine through a link, without containers or volumes of the tests afterwards."""
    with docker.link() as link:
        yield link.engine()
        clean(link.engine())


def clean(engine: Engine) -> None:
    for found in engine.ours(CLUSTER):
        engine._remove(found.id, force=True)
    for volume in engine.our_volumes(CLUSTER):
        engine.remove_volume(volume.name)


@pytest.fixture(scope="session")
def netns_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHost]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as host:
        yield host


@dataclass(frozen=True)
class Remote:
    """The engine as it is seen from here: behind sshd, since the host shares our file system."""

    host: NetnsHost
    docker: Docker

    def link(self, *, target: dict[str, Any] | None = None, **options: Any) -> HostLink:
        where = self.host.target(docker_socket=str(self.docker.socket), **(target or {}))
        return HostLink("gpu-a", where, log_folder=self.docker.logs, **{"patience_s": 0, **options})


@pytest.fixture
def remote(netns_host: NetnsHost, docker: Docker) -> Iterator[Remote]:
    yield Remote(netns_host, docker)
    netns_host.mend()
    with docker.link() as link:
        clean(link.engine())
