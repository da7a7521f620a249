"""A gateway in the life of a cluster: the real smg, from an image that was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.docker import Docker
from tests.support.python_image import import_gateway

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]


@pytest.fixture(scope="module")
def gateway_image(docker: Docker) -> str:
    with docker.link() as link:
        return import_gateway(link.engine())


@pytest.fixture
def front(lab: Lab, gateway_image: str, ports: Callable[[], int]) -> dict[str, Any]:
    """A gateway before the service `plain`, as cluster.yaml has it; tests change it."""
    lab.data["services"] = lab.data["services"][:1]
    lab.data["image"]["prebuilt_gateway"] = gateway_image
    gateway = {
        "name": "front",
        "service": "plain",
        "port": ports(),
        "metrics_port": ports(),
        "health": {"path": "/ready", "interval_s": 1},
        "stop_timeout_s": 5,
    }
    lab.data["gateways"] = [gateway]
    return gateway


def test_a_gateway_runs_from_an_image_that_is_there(
    lab: Lab, front: dict[str, Any], gateway_image: str
) -> None:
    code, up, _ = lab.up()
    found = lab.engine.find("lab-front-0")
    assert found is not None
    assert (code, found.image) == (0, gateway_image), up


def test_an_image_that_is_not_there_is_told_before_anything_is_planned(
    lab: Lab, front: dict[str, Any]
) -> None:
    lab.data["image"]["prebuilt_gateway"] = "ddtree/none:1"
    code, error, _ = lab.run("plan", "--skip-provisioning")
    assert (code, error["message"]) == (3, "image.prebuilt_gateway: ddtree/none:1 is not on here")
