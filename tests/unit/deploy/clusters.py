"""Clusters and cards for the tests of this folder."""

from __future__ import annotations

from typing import Any

from ddtree_ops.deploy.layout import Card
from ddtree_ops.schemas.cluster import Cluster

ARMS: list[dict[str, Any]] = [
    {"name": "plain", "arm": "ar", "port": 30001},
    {"name": "linear", "arm": "dflash", "port": 30011},
    {"name": "shadow", "arm": "shadow", "budget": 31, "port": 30021},
    {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30031},
    {"name": "wrong", "arm": "unsafe", "budget": 15, "allow_hybrid_unsafe": True, "port": 30041},
]


def cluster(services: list[dict[str, Any]] | None = None, **keys: Any) -> Cluster:
    """A cluster of two hosts; `keys` replace top-level keys."""
    data: dict[str, Any] = {
        "schema": 1,
        "name": "lab",
        "hosts": {"inline": {"a": {"address": "192.0.2.1"}, "b": {"address": "192.0.2.2"}}},
        "model": {"repo": "Qwen/Qwen3.6-27B", "revision": "a" * 40},
        "drafter": {"repo": "z-lab/Qwen3.6-27B-DFlash", "revision": "b" * 40},
        "services": ARMS if services is None else services,
        **keys,
    }
    return Cluster.model_validate(data)


def rehearsal(services: list[dict[str, Any]] | None = None, **keys: Any) -> Cluster:
    """The same for the CPU engine with the shipped pair."""
    return cluster(services, engine="reference", **{"model": None, "drafter": None, **keys})


def cards(count: int = 8, nodes: int = 2, host: str = "a") -> tuple[Card, ...]:
    """Cards in bus order, split evenly over NUMA nodes."""
    return tuple(
        Card(f"GPU-{host}{index}", f"00000000:{index:02x}:00.0", index * nodes // count)
        for index in range(count)
    )
