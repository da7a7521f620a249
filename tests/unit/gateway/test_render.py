"""A gateway's container: real options of smg, the replicas' addresses, and no secret."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from smg.launch_router import parse_router_args
from smg.router_args import RouterArgs

from ddtree_ops.config_file import load_config
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.errors import BadInput
from ddtree_ops.gateway.render import as_made, home_of, render_gateway, smg_options, workers_of
from ddtree_ops.hosts.inventory import Host, Inventory
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.gateway import REFUSED_ARGS

INVENTORY = Inventory(
    (
        Host("a", {"ansible_host": "192.0.2.1"}),
        Host("b", {"ansible_host": "192.0.2.2", "ddtree_address": "198.51.100.2"}),
        Host("c", {"ansible_host": "2001:db8::3"}),
    )
)


def cluster(folder: Path, service: dict[str, Any] | None = None, **gateway: Any) -> Cluster:
    data = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inventory": "hosts.yaml"},
        "secrets": {"api_key": {"env": "KEY"}},
        "services": [
            {
                "name": "tree",
                "arm": "ddtree",
                "budget": 15,
                "port": 30001,
                "replicas": 2,
                "bind": "0.0.0.0",
                **(service or {}),
            }
        ],
        "gateways": [{"name": "front", "service": "tree", "port": 30080, **gateway}],
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(data))
    return load_config(file, Cluster)


def rendered(found: Cluster) -> ContainerSpec:
    return render_gateway(found, found.gateways[0], INVENTORY, "sha256:" + "1" * 64)


def urls(found: Cluster) -> list[str]:
    return [worker.url for worker in workers_of(found, found.gateways[0], INVENTORY)]


def test_every_replica_is_addressed_from_the_gateways_host(tmp_path: Path) -> None:
    assert urls(cluster(tmp_path)) == [
        "http://127.0.0.1:30001",
        "http://127.0.0.1:30002",
        "http://198.51.100.2:30001",
        "http://198.51.100.2:30002",
        "http://[2001:db8::3]:30001",
        "http://[2001:db8::3]:30002",
    ]
    elsewhere = urls(cluster(tmp_path, host="c", service={"hosts": ["c", "a"], "replicas": 1}))
    assert elsewhere == ["http://192.0.2.1:30001", "http://127.0.0.1:30001"]
    exact = urls(cluster(tmp_path, host="c", service={"hosts": ["a"], "bind": "192.0.2.77", "replicas": 1}))
    assert exact == ["http://192.0.2.77:30001"]


def test_the_home_is_the_first_host_of_the_service_unless_told(tmp_path: Path) -> None:
    assert home(cluster(tmp_path)) == "a"
    assert home(cluster(tmp_path, service={"hosts": ["c", "b"]})) == "b"
    assert home(cluster(tmp_path, host="c")) == "c"


def home(found: Cluster) -> str:
    return home_of(found, found.gateways[0], INVENTORY)


def test_a_replica_on_loopback_of_another_host_is_refused(tmp_path: Path) -> None:
    """With an inventory only its reader knows the hosts, so the schema cannot say it."""
    found = cluster(tmp_path, service={"bind": "127.0.0.1"})
    with pytest.raises(BadInput, match=r"gateways\.front\.service: .*127\.0\.0\.1 on b, .*that a can reach"):
        rendered(found)


def test_the_container(tmp_path: Path) -> None:
    spec = rendered(cluster(tmp_path, bind="0.0.0.0", stop_timeout_s=30))
    assert (spec.name, spec.service, spec.secret_env) == ("lab-front-0", "front", ("DDTREE_API_KEY",))
    assert spec.stop_timeout_s > 30
    assert spec.healthcheck is not None
    assert "http://127.0.0.1:30080/readiness" in spec.healthcheck.argv[-1]
    assert "api-key" not in json.dumps(spec.public())


def test_equal_files_make_equal_containers_and_a_new_replica_another(tmp_path: Path) -> None:
    first, again = rendered(cluster(tmp_path)), rendered(cluster(tmp_path))
    assert first.config_hash == again.config_hash
    assert rendered(cluster(tmp_path, service={"replicas": 3})).config_hash != first.config_hash


def test_smg_itself_takes_the_options_and_means_what_we_mean(tmp_path: Path) -> None:
    health = {"path": "/ready", "interval_s": 7, "timeout_s": 3, "failures": 4, "successes": 2}
    found = cluster(
        tmp_path,
        policy="least_load",
        cache_threshold=0.5,
        health=health,
        max_concurrent=9,
        queue=0,
        queue_timeout_s=11,
        request_timeout_s=12,
        retries=0,
        start_timeout_s=13.2,
        stop_timeout_s=14,
        metrics_port=29123,
        extra_args=["--spill-abs-threshold", "8"],
    )
    args = parse_router_args(smg_options(found.gateways[0], ["http://127.0.0.1:1", "http://127.0.0.1:2"]))
    meant = {
        "host": "127.0.0.1",
        "port": 30080,
        "worker_urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
        "policy": "least_load",
        "cache_threshold": 0.5,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": 29123,
        "max_concurrent_requests": 9,
        "queue_size": 0,
        "queue_timeout_secs": 11,
        "request_timeout_secs": 12,
        "retry_max_retries": 1,
        "worker_startup_timeout_secs": 14,
        "shutdown_grace_period_secs": 14,
        "health_check_endpoint": "/ready",
        "health_check_interval_secs": 7,
        "health_check_timeout_secs": 3,
        "health_failure_threshold": 4,
        "health_success_threshold": 2,
        "history_backend": "none",
        "balance_abs_threshold": 8,
        "api_key": None,
        "control_plane_api_keys": [],
    }
    assert {key: getattr(args, key) for key in meant} == meant


def test_every_option_that_is_refused_exists() -> None:
    """Else a renamed option of a later smg would slip through."""
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    assert set(REFUSED_ARGS) - set(parser._option_string_actions) == set()


def test_an_older_container_says_where_it_listened_and_for_whom(tmp_path: Path) -> None:
    ports = {"port": 30080, "metrics_port": 29001}
    old = cluster(
        tmp_path, bind="0.0.0.0", metrics_bind="127.0.0.2", service={"replicas": 1}, **ports
    ).gateways[0]
    now = cluster(tmp_path, port=30099).gateways[0]
    was, workers = as_made(now, smg_options(old, ["http://127.0.0.1:30001", "http://[2001:db8::3]:30001"]))
    assert workers == ["http://127.0.0.1:30001", "http://[2001:db8::3]:30001"]
    assert (was.bind, was.port, was.metrics_bind, was.metrics_port) == ("0.0.0.0", 30080, "127.0.0.2", 29001)
    assert as_made(now, ["--port", "30001"])[1] == []
