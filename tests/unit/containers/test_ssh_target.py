"""How a host is reached: as Ansible reaches it, with its key checked, and nothing asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.failures import HostUnreachable
from ddtree_ops.containers.ssh import SshTarget
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.hosts.inventory import Host
from ddtree_ops.hosts.runner import SshOptions


def effective(target: SshTarget, tmp_path: Path) -> dict[str, str]:
    """What ssh itself makes of the arguments, with a user's own file against them."""
    config = tmp_path / "config"
    config.write_text(
        "Host *\n  StrictHostKeyChecking no\n  ControlPersist 10m\n  ForwardAgent yes\n  BatchMode no\n"
    )
    argv = ["ssh", "-G", "-F", str(config), *target.arguments(), "--", target.address]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    seen: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        seen.setdefault(key, value)  # ssh lists its choices in order
    return seen


def test_a_host_is_reached_as_ansible_would(tmp_path: Path) -> None:
    variables = {
        "ansible_host": "10.0.0.7",
        "ansible_port": "2200",
        "ansible_user": "ops",
        "ansible_ssh_private_key_file": "/keys/of-the-host",
        "ansible_ssh_common_args": "-o ProxyJump=gate.example -o StrictHostKeyChecking=no",
    }
    ssh = SshOptions(
        known_hosts=tmp_path / "known hosts", private_key=Path("/keys/general"), connect_timeout_s=7
    )
    target = SshTarget.of(Host("gpu-a", variables), ssh)
    seen = effective(target, tmp_path)
    assert (seen["hostname"], seen["port"], seen["user"]) == ("10.0.0.7", "2200", "ops")
    assert seen["identityfile"] == "/keys/of-the-host"
    assert seen["proxyjump"] == "gate.example"
    assert seen["connecttimeout"] == "7"
    assert "known hosts" in seen["userknownhostsfile"]


def test_no_configuration_switches_off_the_check_of_keys_or_asks_anything(tmp_path: Path) -> None:
    seen = effective(SshTarget("gpu-a", options=("-o", "StrictHostKeyChecking=no")), tmp_path)
    assert seen["stricthostkeychecking"] in {"yes", "true"}
    assert seen["batchmode"] == "yes"
    assert seen["forwardagent"] == "no"
    assert seen["controlpersist"] == "no"
    assert seen["serveraliveinterval"] == "5"


@pytest.mark.parametrize(("variables", "local"), [({"ansible_connection": "local"}, True), ({}, False)])
def test_this_machine_needs_no_ssh(variables: dict[str, Any], local: bool) -> None:
    target = SshTarget.of(Host("here", variables), SshOptions())
    assert target.local is local
    if local:
        with HostLink("here", target) as link:
            assert link.alive()
            assert link.forward("0.0.0.0", 30000) == "http://127.0.0.1:30000"
            assert link.forward("fd00::7", 30000) == "http://[fd00::7]:30000"


def test_a_machine_without_ssh_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with HostLink("gpu-a", SshTarget("127.0.0.1"), patience_s=0) as link, pytest.raises(BadEnvironment):
        link.connect()


def test_a_refused_connection_is_unreachable_and_names_the_command_to_try(tmp_path: Path) -> None:
    with (
        HostLink("gpu-a", SshTarget("127.0.0.1", port=9, user="ops"), patience_s=0) as link,
        pytest.raises(HostUnreachable, match=r"gpu-a cannot be reached by ssh: .*refused") as caught,
    ):
        link.engine().info()
    assert caught.value.remedy == "try 'ssh -o BatchMode=yes -p 9 ops@127.0.0.1 true'"


def test_an_address_cannot_become_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every ssh that is started: a double writes down what it was given."""
    words = tmp_path / "words"
    double = tmp_path / "ssh"
    double.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {words}\necho end >> {words}\nexec cat\n')
    double.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    evil = "-oProxyCommand=anything"
    with HostLink("gpu-a", SshTarget(evil), patience_s=0) as link:
        link.connect()
        link.forward("127.0.0.1", 30000)
        link.run("true")
    calls = words.read_text().split("end\n")[:-1]
    assert len(calls) == 3
    for call in calls:
        argv = call.splitlines()
        assert argv[argv.index(evil) - 1] == "--"


def test_a_connection_is_tried_again_until_patience_ends_and_a_wrong_name_is_not() -> None:
    for address, tries in (("127.0.0.1", range(2, 99)), ("no-such-host.invalid", range(1))):
        waits: list[float] = []

        def wait(seconds: float, waits: list[float] = waits) -> None:
            waits.append(seconds)
            time.sleep(min(seconds, 0.1))

        with (
            HostLink("gpu-a", SshTarget(address, port=9), patience_s=0.6, sleep=wait) as link,
            pytest.raises(HostUnreachable),
        ):
            link.connect()
        assert len(waits) in tries


def test_a_link_that_is_closed_while_it_is_tried_gives_up() -> None:
    link = HostLink("gpu-a", SshTarget("127.0.0.1", port=9), patience_s=600)
    failures: list[Exception] = []

    def connect() -> None:
        try:
            link.connect()
        except HostUnreachable as failure:
            failures.append(failure)

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.5)
    link.close()
    thread.join(60)
    assert len(failures) == 1


def test_docker_is_not_imported_before_an_engine_is_asked() -> None:
    code = (
        "import sys\n"
        "import ddtree_ops.bench.sweep, ddtree_ops.compare.analysis, ddtree_ops.containers.service\n"
        "assert not {'docker', 'requests', 'ansible_runner'} & set(sys.modules), 'imported too early'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_docker_s_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with (
        HostLink("here", SshTarget("localhost", local=True)) as link,
        pytest.raises(BadEnvironment, match="not installed") as caught,
    ):
        link.engine().info()
    assert "ddtree[deploy]" in (caught.value.remedy or "")


def test_a_key_that_is_not_there_is_no_reason_to_try_others(tmp_path: Path) -> None:
    target = SshTarget("127.0.0.1", private_key=tmp_path / "nothing")
    with HostLink("gpu-a", target) as link, pytest.raises(BadInput, match=r"private key: found .*nothing"):
        link.connect()
