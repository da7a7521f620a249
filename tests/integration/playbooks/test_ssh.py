"""Over a real sshd with key login: host keys, unreachable hosts, and `ddtree deploy check`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from ddtree_ops.cli import app
from ddtree_ops.hosts.runner import RunStatus

from .conftest import SshHost, play

pytestmark = [pytest.mark.root, pytest.mark.sshd]


def test_a_host_with_a_known_key_is_reached(ssh_host: SshHost, tmp_path: Path) -> None:
    book = play(
        tmp_path,
        "- ansible.builtin.command: {argv: [sh, -c, 'echo $SSH_CONNECTION']}\n"
        "  register: seen\n"
        "- ansible.builtin.set_fact: {seen: '{{ seen.stdout }}'}",
    )
    outcome = ssh_host.runner().run(book)
    outcome.require_ok()
    assert outcome.facts["gpu-a"]["seen"].split()[2:] == [ssh_host.address, str(ssh_host.port)]


def test_a_host_with_an_unknown_key_is_refused_as_unreachable(ssh_host: SshHost, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    outcome = ssh_host.runner(known_hosts=empty).run(play(tmp_path, "- ansible.builtin.ping: {}"))
    assert outcome.status is RunStatus.FAILED
    # Whether Ansible still catches ssh's own words is a race; the key is what differs from the test above.
    assert list(outcome.unreachable) == ["gpu-a"]
    assert outcome.failed == {}


def test_a_host_that_does_not_answer_is_unreachable_and_not_failed(ssh_host: SshHost, tmp_path: Path) -> None:
    outcome = ssh_host.runner(port=2223).run(play(tmp_path, "- ansible.builtin.ping: {}"))
    assert list(outcome.unreachable) == ["gpu-a"]
    assert outcome.failed == {}


def test_check_reads_one_host_and_says_why_the_others_could_not_be(
    ssh_host: SshHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = {"ansible_python_interpreter": sys.executable}
    host = {"address": ssh_host.address, "user": "root", "vars": python}
    cluster = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {
            "inline": {
                "gpu-a": {**host, "port": ssh_host.port},
                "gpu-b": {**host, "port": 2223},
                "gpu-c": {
                    **host,
                    "port": ssh_host.port,
                    "vars": {"ansible_python_interpreter": "/no/python"},
                },
            }
        },
        "ssh": {
            "known_hosts": str(ssh_host.known_hosts),
            "private_key": str(ssh_host.private_key),
            "become": False,
        },
        "paths": {"min_free_gib": 0},
        "services": [{"name": "tree", "arm": "ddtree", "budget": 31, "port": 30001}],
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    code = app.run(["deploy", "check", "-f", str(file), "--save", str(tmp_path / "captures"), "--json"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {(one["host"], one["id"]): one for one in answer["findings"]}
    assert code == 1
    assert found["gpu-b", "host.reachable"]["status"] == "fail"
    assert "unreachable" in found["gpu-b", "host.reachable"]["found"]
    assert found["gpu-c", "host.reachable"]["found"].startswith("cannot be read: facts: Run the probe")
    assert "/no/python" in found["gpu-c", "host.reachable"]["found"], "what the host itself said is missing"
    assert found.get(("gpu-a", "host.reachable")) is None, "the one host that is fine"
    assert found["gpu-a", "host.root"]["status"] == "pass"
    assert found["gpu-a", "gpu.count"]["status"] == "skip"
    assert ("gpu-b", "host.root") not in found
    saved = json.loads((tmp_path / "captures" / "gpu-a.json").read_text())
    assert saved["kernel"] == os.uname().release
