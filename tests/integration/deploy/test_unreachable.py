"""Hosts without an answer: waited for by `up`, told by what only looks, and nobody else's trouble."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.containers.connection import HostUnreachable
from ddtree_ops.deploy.session import open_cluster
from tests.support.ops import start_ddtree
from tests.support.ssh_host import PORT, NetnsHost, run_sshd

from .conftest import Lab

#: Nobody listens on the port `discard`.
GONE = {"address": "127.0.0.1", "port": 9}
WAITING = "waiting for it"


@pytest.fixture
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHost]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as host:
        yield host


def events_until(command: subprocess.Popen[str], words: str) -> list[dict[str, Any]]:
    """What it says, up to the event with these words; all of it where they do not come."""
    assert command.stdout is not None
    seen = []
    for line in command.stdout:
        seen.append(json.loads(line))
        if words in line:
            break
    return seen


@pytest.mark.docker
@pytest.mark.root
def test_a_host_that_stays_away_is_told_and_keeps_no_other_from_work(lab: Lab) -> None:
    lab.data["hosts"]["inline"]["gone"] = GONE
    lab.data["deadlines"]["connect"] = 1
    code, plan, _ = lab.run("plan", "--skip-provisioning")
    assert (code, list(plan["unknown"]), [one["host"] for one in plan["hosts"]]) == (0, ["gone"], ["here"])
    assert [step["action"] for step in plan["hosts"][0]["containers"]] == ["create", "create"]

    code, up, _ = lab.up()
    assert (code, list(up["unreachable"]), up["failed"]) == (1, ["gone"], {})
    assert up["seconds"]["hosts"] >= 1, "it was given up at once"
    assert sorted(lab.ids()) == ["lab-plain-0", "lab-tree-0"]

    code, status, _ = lab.run("status")
    states = {(one["host"], one["container"]): one["state"] for one in status["replicas"]}
    assert (code, list(status["unreachable"])) == (1, ["gone"])
    assert states == {
        ("here", "lab-plain-0"): "running",
        ("here", "lab-tree-0"): "running",
        ("gone", "lab-plain-0"): "unknown",
        ("gone", "lab-tree-0"): "unknown",
    }


@pytest.mark.docker
@pytest.mark.root
@pytest.mark.sshd
def test_a_host_that_boots_is_waited_for(lab: Lab, far: NetnsHost) -> None:
    here = lab.data["hosts"]["inline"].pop("here")
    del here["vars"]["ansible_connection"]
    lab.data["hosts"]["inline"]["far"] = {**here, "address": far.address, "port": PORT, "user": "root"}
    keys = {"private_key": str(far.folder / "user_key"), "known_hosts": str(far.folder / "known_hosts")}
    lab.data["ssh"] = {**keys, "connect_timeout_s": 1}
    lab.data["deadlines"]["connect"] = 600
    key = lab.file.with_name("key")
    key.write_text("s3cret-key-of-the-test")
    key.chmod(0o600)
    lab.data["secrets"] = {"api_key": {"file": "key"}}
    for service in lab.data["services"]:
        service["bind"] = far.gateway  # the host has a network of its own, and its containers have ours
    lab.file.write_text(yaml.safe_dump(lab.data))

    far.cut()
    with start_ddtree("--json", "deploy", "up", "--skip-provisioning", "--cluster", lab.file) as command:
        seen = events_until(command, WAITING)
        far.mend()
        seen += events_until(command, "no such words")
    assert any(WAITING in event.get("text", "") for event in seen), seen[-1]
    assert (command.returncode, seen[-1]["ok"], seen[-1]["unreachable"]) == (0, True, {}), seen[-1]
    assert sorted(lab.ids()) == ["lab-plain-0", "lab-tree-0"]


def cluster_file(folder: Path, **deadlines: float) -> Path:
    file = folder / "cluster.yaml"
    data = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"gone": GONE, "here": {"vars": {"ansible_connection": "local"}}}},
        "deadlines": deadlines,
        "services": [{"name": "plain", "arm": "ar", "port": 30001}],
    }
    file.write_text(yaml.safe_dump(data))
    return file


def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    file = cluster_file(tmp_path, connect=3600)
    with start_ddtree("--json", "deploy", "up", "--skip-provisioning", "--cluster", file) as command:
        try:
            seen = events_until(command, WAITING)
            command.send_signal(signal.SIGINT)
            command.communicate(timeout=300)
        finally:
            command.kill()
    assert any(WAITING in event.get("text", "") for event in seen), seen[-1]
    assert command.returncode == 130


def test_what_needs_all_hosts_goes_on_without_a_lost_one(tmp_path: Path) -> None:
    with open_cluster(cluster_file(tmp_path), connect=False) as session:

        def connect(hosts: list[str]) -> list[str]:
            for host in hosts:
                session.links[host].connect(patience_s=0)
            return hosts

        assert session.together(connect, session.hosts) == ["here"]
        assert list(session.unreachable) == ["gone"]

        def fail(hosts: list[str]) -> None:
            raise HostUnreachable("somebody else")

        with pytest.raises(HostUnreachable, match="somebody else"):
            session.together(fail, ["here"])
