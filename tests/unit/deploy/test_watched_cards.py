"""Whose GPUs a sweep over a cluster looks at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.found import Found
from ddtree_ops.containers.ssh import SshTarget
from ddtree_ops.deploy.layout import lay_out
from ddtree_ops.deploy.rotation import seat
from ddtree_ops.deploy.sweep import Serving, watch_cards
from tests.support.nvidia_smi import busy, install
from tests.unit.deploy.clusters import cards, cluster


def test_hosts_with_gpus_of_replicas_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the links that the cluster has already; here both hosts are this machine."""
    install(tmp_path, busy(0, "GPU-a0"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    service = {"name": "linear", "arm": "dflash", "port": 30001}
    there = {"a": cards(1), "b": cards(1, host="b")}
    serving = {
        one.host: Serving(
            one,
            Found("lab-linear-0", "1", "lab", "linear", 0, "hash", "sha256:ours", "running"),
            seat(one, one.gpus if one.host == "a" else (), there[one.host], number=0),
        )
        for one in lay_out(cluster([service]), ["a", "b"], there)
    }
    links = {host: HostLink(host, SshTarget("here", local=True)) for host in there}
    assert watch_cards(links, [serving["b"]]) is None
    watch = watch_cards(links, serving.values())
    assert watch is not None
    watch.start()
    deadline = time.monotonic() + 120
    while not watch.samples():
        assert time.monotonic() < deadline, "no sample came"
        time.sleep(0.02)
    watch.stop()
    assert {one.host for some in watch.samples().values() for one in some} == {"a"}
    assert watch.trouble("b") is None
