"""Inventories: read by ansible-inventory itself; each call is a process of its own, so there are few."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.cli import app
from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.inventory import Inventory, load_inventory, read_inventory
from ddtree_ops.schemas.cluster import Cluster

INI = """
[gpu]
gpu-a ansible_host=192.0.2.10 ansible_user=ops
gpu-b ansible_host=192.0.2.11

[gpu:vars]
ansible_port=2222

[web]
www

[all_of:children]
gpu
web
"""


def cluster(source: dict[str, Any], **service: Any) -> Cluster:
    return Cluster.model_validate(
        {
            "schema": 1,
            "name": "lab",
            "engine": "reference",
            "hosts": source,
            "services": [{"name": "tree", "arm": "ddtree", "budget": 31, "port": 30001, **service}],
        }
    )


def inline(**hosts: dict[str, Any]) -> Inventory:
    return load_inventory(cluster({"inline": hosts}), Path())


def test_hosts_of_a_group_come_with_the_groups_variables(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text(INI)
    found = load_inventory(cluster({"inventory": "hosts.ini", "group": "gpu"}), tmp_path)
    assert found.names == ["gpu-a", "gpu-b"]
    assert found.hosts[0].address == "192.0.2.10"
    assert found.for_ansible()["all"]["hosts"]["gpu-b"]["ansible_port"] == 2222


def test_init_takes_an_inventory_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.ini").write_text(INI)
    file = tmp_path / "c.yaml"
    assert app.run(["deploy", "init", str(file), "--inventory", str(tmp_path / "hosts.ini"), "--json"]) == 0
    assert load_config(file, Cluster).hosts.inventory == tmp_path / "hosts.ini"
    assert json.loads(capsys.readouterr().out)["file"] == str(file)


def test_groups_below_a_group_count_and_an_unknown_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text(INI)
    assert read_inventory(tmp_path / "hosts.ini", "all_of").names == ["gpu-a", "gpu-b", "www"]
    with pytest.raises(BadInput, match=r"found no host in 'cpu', allowed: one of .*gpu"):
        read_inventory(tmp_path / "hosts.ini", "cpu")


def test_an_inventory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("all: {hosts: [not, a, mapping]}\n")
    with pytest.raises(BadInput, match=r"hosts\.yaml: ansible-inventory cannot read it: .+"):
        read_inventory(tmp_path / "hosts.yaml")
    with pytest.raises(
        BadInput, match=r"hosts\.inventory: found .*none.*an inventory file or folder that exists"
    ):
        read_inventory(tmp_path / "none")


def test_inline_hosts_become_ansible_variables() -> None:
    found = inline(a={"address": "192.0.2.1", "user": "ops", "port": 22, "vars": {"rack": 3}}, b={})
    assert found.for_ansible()["all"]["hosts"] == {
        "a": {"ansible_host": "192.0.2.1", "ansible_user": "ops", "ansible_port": 22, "rack": 3},
        "b": {},
    }
    assert found.hosts[1].address == "b"


def test_a_limit_names_known_hosts_only() -> None:
    found = inline(a={}, b={})
    assert found.limited(["b"]).names == ["b"]
    assert found.limited([]) is found
    with pytest.raises(BadInput, match="--limit: found 'c', allowed: a, b"):
        found.limited(["c"])


@pytest.mark.parametrize(
    "variables",
    [
        {"ansible_host_key_checking": False},
        {"ansible_ssh_host_key_checking": "no"},
        {"ansible_ssh_common_args": "-o StrictHostKeyChecking=no"},
        {"ansible_ssh_extra_args": "-o UserKnownHostsFile=/dev/null"},
        {"ansible_ssh_args": "-oStrictHostKeyChecking accept-new"},
    ],
)
def test_a_host_whose_key_would_not_be_checked_is_refused(variables: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="host-key checking switched off, allowed: on"):
        inline(a={"vars": variables})


def test_a_host_shows_no_variables() -> None:
    assert "hunter2" not in repr(inline(a={"vars": {"ansible_password": "hunter2"}}))


def test_a_service_on_an_unknown_host_of_an_inventory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text("a\n")
    with pytest.raises(BadInput, match=r"services\.tree\.hosts: found 'z', allowed: a"):
        load_inventory(cluster({"inventory": "hosts.ini"}, hosts=["z"]), tmp_path)
