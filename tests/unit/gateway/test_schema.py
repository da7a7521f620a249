"""``gateways`` of cluster.yaml: its rules, each with the place and what is allowed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.inventory import load_inventory
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.gateway import Policy


def cluster_data(**gateway: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"a": {}, "b": {}}},
        "secrets": {"api_key": {"env": "KEY"}},
        "services": [
            {"name": "tree", "arm": "ddtree", "budget": 15, "port": 30001, "bind": "0.0.0.0", "replicas": 2},
            {"name": "plain", "arm": "ar", "port": 30011, "hosts": ["b"]},
        ],
        "gateways": [{"name": "front", "service": "tree", "port": 30080, **gateway}],
    }


def load(data: Any, folder: Path) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(data))
    return load_config(file, Cluster)


def test_defaults(tmp_path: Path) -> None:
    gateway = load(cluster_data(), tmp_path).gateways[0]
    assert (gateway.policy, gateway.bind, gateway.health.path) == (Policy.CACHE_AWARE, "127.0.0.1", "/health")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"service": "tre"}, r"gateways\.0\.service: found 'tre', allowed: tree, plain"),
        ({"name": "tree"}, r"gateways\.0\.name: found 'tree', allowed: a name of its own"),
        ({"host": "c"}, r"gateways\.0\.host: found 'c', allowed: a, b"),
        ({"port": 30002}, r"gateways\.0\.port: found 30002, allowed: a free port \(service tree has it\)"),
        ({"metrics_port": 30001}, r"gateways\.0\.metrics_port: .*service tree has it"),
        ({"metrics_port": 9090}, r"gateways\.0\.metrics_port: .*monitoring\.prometheus_port has it"),
        ({"metrics_port": 30080}, r"gateways\.0\.metrics_port: .*\(port has it\)"),
        ({"bind": "front"}, r"gateways\.0\.bind: found 'front', allowed: an IP address"),
        ({"policy": "manual"}, r"gateways\.0\.policy: found 'manual', allowed: .*cache_aware"),
        ({"health": {"path": "/metrics"}}, r"gateways\.0\.health\.path: found '/metrics'"),
        ({"extra_args": ["--api-key", "x"]}, r"extra_args\.0: found '--api-key', .*secrets\.api_key"),
        # argparse takes any unambiguous beginning of an option for the option.
        ({"extra_args": ["--api-k=x"]}, r"extra_args\.0: found '--api-k', .*secrets\.api_key"),
        ({"extra_args": ["--control-plane-api", "x"]}, r"extra_args\.0: .*secrets\.api_key"),
        ({"extra_args": ["--enable-mesh"]}, r"extra_args\.0: found '--enable-mesh'"),
        ({"extra_args": ["--spill-abs-threshold", "8"]}, None),
        ({"host": "b", "port": 30012}, None),
        ({"surprise": 1}, r"gateways\.0\.surprise: found an unknown key"),
    ],
)
def test_rules(changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    data = cluster_data(**changes)
    if message is None:
        load(data, tmp_path)
        return
    with pytest.raises(BadInput, match=message):
        load(data, tmp_path)


def test_beyond_loopback_it_needs_a_key(tmp_path: Path) -> None:
    data = cluster_data(service="plain", bind="0.0.0.0")
    data["services"][0]["bind"] = "127.0.0.1"
    load(data, tmp_path)
    del data["secrets"]
    with pytest.raises(BadInput, match=r"gateways\.0\.bind: found '0\.0\.0\.0', allowed: loopback, or set"):
        load(data, tmp_path)


def test_replicas_on_other_hosts_must_be_reachable(tmp_path: Path) -> None:
    data = cluster_data()
    data["services"][0]["bind"] = "127.0.0.1"
    with pytest.raises(BadInput, match=r"gateways\.0\.service: .*reach on b too: its bind is 127\.0\.0\.1"):
        load(data, tmp_path)
    data["services"][0]["hosts"] = ["b"]
    with pytest.raises(BadInput, match="can reach on b too"):
        load(put_gateway(data, host="a"), tmp_path)
    load(put_gateway(data, host="b"), tmp_path)
    load(data, tmp_path)


def test_two_gateways_of_one_host_need_two_ports(tmp_path: Path) -> None:
    data = cluster_data()
    second = {"name": "back", "service": "plain", "port": 30080, "metrics_port": 29001}
    data["gateways"].append(second)
    load(data, tmp_path)
    second["host"] = "a"
    data["services"][1] |= {"bind": "0.0.0.0"}
    with pytest.raises(BadInput, match=r"gateways\.1\.port: found 30080, .*gateway front has it"):
        load(data, tmp_path)


def test_the_unsafe_arm_gets_no_front_door(tmp_path: Path) -> None:
    data = cluster_data()
    data["services"][0] |= {"arm": "unsafe", "allow_hybrid_unsafe": True}
    with pytest.raises(BadInput, match=r"gateways\.0\.service: .*whose output is wrong"):
        load(data, tmp_path)


def test_a_host_that_the_inventory_lacks_is_named(tmp_path: Path) -> None:
    data = cluster_data(host="zeta")
    data["hosts"] = {"inventory": "hosts.yaml"}
    data["services"][1].pop("hosts")
    (tmp_path / "hosts.yaml").write_text("all: {hosts: {a: {}, b: {}}}\n")
    with pytest.raises(BadInput, match=r"gateways\.front\.host: found 'zeta', allowed: a, b"):
        load_inventory(load(data, tmp_path), tmp_path)


def put_gateway(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    data["gateways"][0] |= changes
    return data
