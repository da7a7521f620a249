"""What the checks hold a host against."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_ops.schemas.cluster import Cluster, EngineKind, Service

GIB = 2**30


@dataclass(frozen=True)
class Expectations:
    """What the checks hold a host against; from cluster.yaml."""

    gpus: bool = True
    gpu_model: str = "RTX PRO 6000 Blackwell"
    gpu_count: int = 8
    power_cap: int | None = None
    branch: int = 580
    cuda: str = "13.0"
    tp: int = 1
    paths: tuple[str, ...] = ("/var/lib/ddtree/models",)
    min_free: int = 250 * GIB
    ports: tuple[int, ...] = ()


def expectations(cluster: Cluster, host: str) -> Expectations:
    """What a cluster.yaml wants of one of its hosts."""
    services = [service for service in cluster.services if service.hosts is None or host in service.hosts]
    monitoring = cluster.monitoring
    exporters = (monitoring.node_exporter_port, monitoring.gpu_exporter_port) if monitoring.enabled else ()
    return Expectations(
        gpus=cluster.engine is EngineKind.SGLANG,
        gpu_model=cluster.gpu.model,
        gpu_count=cluster.gpu.count,
        power_cap=cluster.gpu.power_cap_w,
        branch=cluster.driver.branch,
        cuda=cluster.image.cuda,
        tp=max((service.tp for service in services), default=1),
        paths=(cluster.paths.models, cluster.paths.state),
        min_free=cluster.paths.min_free_gib * GIB,
        ports=(*_service_ports(services), *exporters),
    )


def _service_ports(services: list[Service]) -> list[int]:
    return [port for service in services for port in service.ports]
