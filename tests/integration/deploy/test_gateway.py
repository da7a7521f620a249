"""A gateway in the life of a cluster: the real smg from an image that was there, rolled back by its name."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.docker import Docker
from tests.support.python_image import import_gateway

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]
FRONT, PREVIOUS = "lab-front-0", "lab-front-0.previous"


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


def answers(gateway: dict[str, Any]) -> bool:
    url = f"http://127.0.0.1:{gateway['port']}/readiness"
    try:
        return httpx.get(url, trust_env=False, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_gateway_goes_back_by_its_name_and_forth_again_and_not_to_one_that_does_not_serve(
    lab: Lab, front: dict[str, Any], ports: Callable[[], int], gateway_image: str
) -> None:
    code, up, _ = lab.up()
    assert (code, sorted(lab.ids())) == (0, [FRONT, "lab-plain-0"]), up
    first = lab.ids()
    found = lab.engine.find(FRONT)
    assert found is not None
    assert found.image == gateway_image
    code, error, _ = lab.run("rollback", "--service", "front")
    assert (code, error["message"]) == (1, "there is no previous container to go back to")
    assert lab.up()[1]["changes"] == 0

    old = dict(front)
    front.update(port=ports(), policy="round_robin")
    code, up, _ = lab.up()
    second = lab.ids()
    assert (code, second[PREVIOUS], second["lab-plain-0"]) == (0, first[FRONT], first["lab-plain-0"]), up
    assert (answers(old), answers(front)) == (False, True)

    code, back, _ = lab.run("rollback", "--service", "front")
    assert (code, back["swapped"], back["failed"]) == (0, [f"here/{FRONT}"], {})
    assert lab.ids() == {**first, PREVIOUS: second[FRONT]}
    assert (answers(old), answers(front)) == (True, False)
    code, status, _ = lab.run("status")
    assert (code, status["gateways"][0]["reason"]) == (1, "differs from cluster.yaml")

    code, back, _ = lab.run("rollback", "--service", "front")
    assert (code, lab.ids()) == (0, second), back
    assert answers(front)
    code, error, _ = lab.run("rollback")
    assert (code, error["message"]) == (1, "there is no previous container to go back to")
    assert lab.ids() == second, "a gateway went back without being named"

    with socket.socket() as somebody_else:
        somebody_else.bind(("127.0.0.1", old["port"]))
        somebody_else.listen()
        code, back, _ = lab.run("rollback", "--service", "front")
    assert (code, list(back["failed"]), back["swapped"]) == (1, [f"here/{FRONT}"], []), back
    assert "swapped back" in back["failed"][f"here/{FRONT}"]
    assert lab.ids() == second


def test_an_image_that_is_not_there_is_told_before_anything_is_planned(
    lab: Lab, front: dict[str, Any]
) -> None:
    lab.data["image"]["prebuilt_gateway"] = "ddtree/none:1"
    code, error, _ = lab.run("plan", "--skip-provisioning")
    assert (code, error["message"]) == (3, "image.prebuilt_gateway: ddtree/none:1 is not on here")
