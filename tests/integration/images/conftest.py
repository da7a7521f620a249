"""Two Docker engines of the tests' own: one that builds, one that gets images carried to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddtree_ops.containers.connection import HostLink, SshTarget
from ddtree_ops.errors import DdtreeError
from ddtree_ops.images.context import LABEL_IMAGE
from tests.support.docker import Docker, require_docker, run_dockerd


@pytest.fixture(scope="module")
def dockers() -> Iterator[tuple[Docker, Docker]]:
    require_docker()
    folders = [Path(tempfile.mkdtemp(prefix="ddt-images-")) for _ in "ab"]
    try:
        with ExitStack() as stack:
            first, second = (stack.enter_context(run_dockerd(folder)) for folder in folders)
            yield first, second
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def links(dockers: tuple[Docker, Docker]) -> Iterator[Mapping[str, HostLink]]:
    """The engines as hosts; images of ours are gone afterwards."""
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                HostLink(name, SshTarget("localhost", local=True, docker_socket=str(docker.socket)))
            )
            for name, docker in zip(("gpu-a", "gpu-b"), dockers, strict=True)
        }
        yield made
        for link in made.values():
            for image in link.engine().images(LABEL_IMAGE):
                for tag in (*image.tags, image.id):
                    with suppress(DdtreeError):
                        link.engine().remove_image(tag)
