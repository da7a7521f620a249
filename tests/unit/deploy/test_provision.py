"""cluster.yaml as variables of the playbooks: nothing is forgotten, nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.deploy.provision import (
    LEFT_TO_THE_INVENTORY,
    TAGS,
    host_variables,
    require_tags,
    variables,
)
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.inventory import load_inventory
from ddtree_ops.hosts.runner import playbooks_folder

from .clusters import cluster, rehearsal

PLAYBOOKS = playbooks_folder()


def defaults() -> set[str]:
    found: set[str] = set()
    for file in PLAYBOOKS.glob("roles/*/defaults/main.yml"):
        found |= set(yaml.safe_load(file.read_text()) or {})
    return found


def per_host(wanted: Any, name: str) -> dict[str, Any]:
    inventory = load_inventory(wanted, Path())
    return host_variables(wanted, next(host for host in inventory.hosts if host.name == name), inventory)


def test_every_variable_of_a_role_is_set_or_left_to_the_inventory_on_purpose() -> None:
    set_here = {*variables(cluster(), Path()), *variables(rehearsal(), Path()), *per_host(cluster(), "a")}
    switches = {"ddtree_gpus", "ddtree_monitoring"}
    assert set_here - switches <= defaults(), "a variable that no role has"
    assert defaults() - set_here == LEFT_TO_THE_INVENTORY
    for name in switches:
        assert name in (PLAYBOOKS / "site.yml").read_text()


def test_tags_are_those_of_the_playbook() -> None:
    plays = yaml.safe_load((PLAYBOOKS / "site.yml").read_text())
    tags = [tag for play in plays for role in play["roles"] for tag in role.get("tags", ())]
    assert tags == list(TAGS)
    assert require_tags(["monitoring"]) == ["monitoring"]
    with pytest.raises(BadInput, match=r"--tags: found 'driver', allowed: preflight, service_host"):
        require_tags(["driver"])


def test_a_rehearsal_installs_nothing_of_nvidias() -> None:
    found = variables(rehearsal(), Path())
    assert (found["ddtree_gpus"], found["monitoring_gpus"]) == (False, False)
    assert found["container_runtime_toolkit_packages"] == []
    assert found["model_cache_models"] == []
    assert "container_runtime_toolkit_packages" not in variables(cluster(), Path())


def test_settings_of_the_file_reach_their_role() -> None:
    wanted = cluster(
        paths={"state": "/s", "models": "/m", "logs": "/l", "min_free_gib": 7},
        driver={"manage": False, "branch": 590, "allow_reboot": True},
        runtime={"allow_restart": True, "toolkit_version": "1.19.0-1"},
        gpu={"power_cap_w": 450},
        monitoring={"retention_days": 3, "grafana_port": 3001},
    )
    found = variables(wanted, Path())
    expected = {
        "service_host_state": "/s", "model_cache_folder": "/m", "service_host_logs": "/l",
        "preflight_min_free_gib": 7, "preflight_paths": ["/m", "/s"], "nvidia_driver_manage": False,
        "nvidia_driver_branch": 590, "nvidia_driver_allow_reboot": True,
        "container_runtime_allow_restart": True,
        "container_runtime_toolkit_version": "1.19.0-1", "gpu_settings_power_cap": 450,
        "monitoring_retention_days": 3, "monitoring_grafana_port": 3001, "model_cache_venv": "/s/hub-client",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_models_are_fetched_at_their_resolved_commit() -> None:
    wanted = cluster(model={"repo": "o/m"}, drafter={"path": "/srv/d"})
    assert variables(wanted, Path())["model_cache_models"] == [{"repo": "o/m", "revision": "main"}]
    found = variables(wanted, Path(), revisions={"o/m": "c" * 40})
    assert found["model_cache_models"] == [{"repo": "o/m", "revision": "c" * 40}]


def test_only_wide_services_bring_peer_to_peer_settings_to_their_hosts() -> None:
    wanted = cluster([{"name": "x", "arm": "dflash", "port": 30001, "tp": 2, "hosts": ["b"]}])
    assert (per_host(wanted, "a")["gpu_settings_tp"], per_host(wanted, "b")["gpu_settings_tp"]) == (1, 2)
    assert per_host(wanted, "b")["nvidia_driver_disable_hmm"] is True


def test_prometheus_asks_what_it_can_reach() -> None:
    services = [
        {"name": "near", "arm": "ar", "port": 30001},
        {"name": "open", "arm": "ddtree", "budget": 31, "port": 30011, "bind": "0.0.0.0", "replicas": 2},
    ]
    wanted = cluster(services, secrets={"api_key": {"env": "KEY"}}, monitoring={"host": "b"})
    assert per_host(wanted, "a")["monitoring_services"] == []
    assert per_host(wanted, "a")["monitoring_server"] is False
    found = per_host(wanted, "b")
    assert {one["name"]: one["address"] for one in found["monitoring_services"]} == {
        "a-open-0": "192.0.2.1:30011",
        "a-open-1": "192.0.2.1:30012",
        "b-near-0": "127.0.0.1:30001",
        "b-open-0": "127.0.0.1:30011",
        "b-open-1": "127.0.0.1:30012",
    }
    assert found["monitoring_hosts"] == [{"name": "b", "address": "127.0.0.1"}]
    assert found["monitoring_gateways"] == []
    everywhere = cluster(services, secrets={"api_key": {"env": "KEY"}}, monitoring={"bind": "0.0.0.0"})
    assert per_host(everywhere, "a")["monitoring_hosts"] == [
        {"name": "a", "address": "127.0.0.1"},
        {"name": "b", "address": "192.0.2.2"},
    ]


def test_prometheus_asks_gateways_that_it_can_reach() -> None:
    """Their metrics bind to loopback unless told, whatever they serve on."""
    services = [{"name": "tree", "arm": "ar", "port": 30001, "bind": "0.0.0.0"}]
    gateways = [
        {"name": "near", "service": "tree", "host": "b", "port": 30080, "bind": "0.0.0.0"},
        {"name": "far", "service": "tree", "port": 30080, "metrics_port": 29001, "metrics_bind": "0.0.0.0"},
        {"name": "hidden", "service": "tree", "port": 30081, "metrics_port": 29002},
    ]
    key = {"api_key": {"env": "KEY"}}
    wanted = cluster(services, gateways=gateways, secrets=key, monitoring={"host": "b"})
    assert per_host(wanted, "a")["monitoring_gateways"] == []
    assert per_host(wanted, "b")["monitoring_gateways"] == [
        {"name": "near", "service": "tree", "address": "127.0.0.1:29000"},
        {"name": "far", "service": "tree", "address": "192.0.2.1:29001"},
    ]
