"""Hosts with fewer cards than their services want: told host by host, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.deploy.lockfile import LockedCard, LockFile, lock_path, write_lock
from tests.support.docker import Docker

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]
NAME = "lab-dflash-0"


@pytest.fixture
def cards_lab(lab: Lab) -> Lab:
    """A cluster for cards on two hosts, which are both this machine."""
    inline = lab.data["hosts"]["inline"]
    inline["small"] = inline["here"]
    service = {"name": "dflash", "arm": "ar", "port": lab.data["services"][0]["port"], "replicas": 2}
    lab.data.update(
        engine="sglang", model={"path": "/models/target"}, services=[service], driver={"manage": False}
    )
    return lab


def locked(count: int) -> list[LockedCard]:
    return [LockedCard(uuid=f"GPU-{index}", bus=f"0000:0{index}:00.0", numa=-1) for index in range(count)]


def test_status_shows_what_runs_on_a_host_that_lost_a_card_and_judges_the_others(
    cards_lab: Lab, docker: Docker
) -> None:
    write_lock(cards_lab.file, LockFile(cards={"here": locked(2), "small": locked(1)}))
    cards_lab.engine.create(docker.spec(NAME))
    cards_lab.engine.start(NAME)
    code, status, _ = cards_lab.run("status")
    found = {(one["host"], one["container"]): (one["state"], one["reason"]) for one in status["replicas"]}
    few = "services: found 2 GPUs asked for on small, allowed: the 1 that it has"
    assert (code, status["strays"]) == (1, [])
    assert found == {
        ("here", "lab-dflash-0"): ("running", "differs from cluster.yaml"),
        ("here", "lab-dflash-1"): ("missing", "there is no container"),
        ("small", "lab-dflash-0"): ("running", few),
        ("small", "lab-dflash-1"): ("missing", few),
    }


def test_a_plan_names_the_host_and_up_refuses_before_anything_is_changed(cards_lab: Lab) -> None:
    """No card is here: a service on one host is one too many, and the other host has none."""
    cards_lab.data["services"][0]["hosts"] = ["small"]
    few = "services: found 2 GPUs asked for on small, allowed: the 0 that it has"
    code, plan, _ = cards_lab.run("plan", "--skip-provisioning")
    hosts: dict[str, Any] = {one["host"]: one for one in plan["hosts"]}
    assert (code, plan["blocked"], hosts["here"]["refused"]) == (1, True, None)
    assert hosts["small"]["refused"].startswith(few)
    assert hosts["here"]["image"].startswith("present ")

    code, error, events = cards_lab.run("up")
    assert (code, error["message"]) == (2, few)
    assert [event["name"] for event in events if event.get("state") == "begun"] == ["hosts", "cards"]
    assert cards_lab.ids() == {}
    assert not lock_path(cards_lab.file).exists()
