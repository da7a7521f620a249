"""``gateways`` of cluster.yaml: one address for all replicas of a service, kept by the gateway `smg`.

The gateway runs in a container of its own on one of the hosts. Requests never pass through code of ours.
"""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from ddtree_ops.config_file import AtKey
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.fields import Address, Count, HostName, Name, Port, Seconds, Text, holder
from ddtree_ops.schemas.sweep import StrictModel

if TYPE_CHECKING:
    from ddtree_ops.schemas.cluster import Cluster, Service

#: Options of smg that ddtree sets itself, that would put a secret into argv, or that start other modes.
REFUSED_ARGS = {
    "--api-key": "secrets.api_key",
    "--tenant-api-key": "secrets.api_key",
    "--control-plane-api-keys": "secrets.api_key",
    "--host": "bind",
    "--port": "port",
    "--worker-urls": "service",
    "--policy": "policy",
    "--cache-threshold": "cache_threshold",
    "--prometheus-host": "metrics_bind",
    "--prometheus-port": "metrics_port",
    "--max-concurrent-requests": "max_concurrent",
    "--queue-size": "queue",
    "--queue-timeout-secs": "queue_timeout_s",
    "--request-timeout-secs": "request_timeout_s",
    "--retry-max-retries": "retries",
    "--disable-retries": "retries",
    "--shutdown-grace-period-secs": "stop_timeout_s",
    "--log-level": "log_level",
    "--worker-startup-timeout-secs": "start_timeout_s",
    "--health-check-endpoint": "health.path",
    "--health-check-interval-secs": "health.interval_s",
    "--health-check-timeout-secs": "health.timeout_s",
    "--health-failure-threshold": "health.failures",
    "--health-success-threshold": "health.successes",
    "--disable-health-check": "health",
    "--oracle-password": "nothing",
    "--postgres-db-url": "nothing",
    "--redis-url": "nothing",
    "--pd-disaggregation": "nothing",
    "--epd-disaggregation": "nothing",
    "--service-discovery": "nothing",
    "--discovery-provider": "nothing",
    "--enable-mesh": "nothing",
    "--enable-rl": "nothing",
    "--enable-wasm": "nothing",
}


class Policy(StrEnum):
    """How the gateway chooses a replica."""

    CACHE_AWARE = "cache_aware"  # the one that holds the prompt's beginning, unless it is much busier
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"  # the less busy of two
    LEAST_LOAD = "least_load"


class GatewayHealth(StrictModel):
    """When a replica gets no more requests, and when it gets them again."""

    path: Literal["/health", "/ready"] = Field(
        "/health", description="/health makes an idle SGLang generate one token; /ready only asks its state"
    )
    interval_s: Annotated[int, Field(strict=True, ge=1, le=3600)] = 5
    timeout_s: Annotated[int, Field(strict=True, ge=1, le=600)] = 5
    failures: Annotated[int, Field(strict=True, ge=1, le=100)] = Field(
        2, description="in a row, before a replica is left out"
    )
    successes: Annotated[int, Field(strict=True, ge=1, le=100)] = Field(
        1, description="in a row, before it is taken back"
    )


class Gateway(StrictModel):
    """One address in front of all replicas of a service."""

    name: Name
    service: Name = Field(description="the service whose replicas it fronts, on all hosts of that service")
    host: HostName | None = Field(
        None, description="where the gateway runs; default: the first host of its service"
    )
    port: Port
    bind: Address = Field("127.0.0.1", description="an IP address; others than loopback need an API key")
    metrics_port: Port = Field(29000, description="Prometheus metrics, which ask for no key")
    metrics_bind: Address = "127.0.0.1"
    policy: Policy = Policy.CACHE_AWARE
    cache_threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.3, description="share of a prompt that a replica must have seen for cache_aware to prefer it"
    )
    health: GatewayHealth = GatewayHealth()
    max_concurrent: Count | None = Field(
        None, description="requests let through at once; null: 1024 for each core, at least 4096"
    )
    queue: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = Field(
        100, description="requests that may wait beyond max_concurrent; past that 429"
    )
    queue_timeout_s: Annotated[int, Field(strict=True, ge=1, le=86400)] = 60
    request_timeout_s: Annotated[int, Field(strict=True, ge=1, le=86400)] = 1800
    retries: Annotated[int, Field(strict=True, ge=0, le=20)] = Field(
        3, description="further replicas tried when one fails before its answer began"
    )
    start_timeout_s: Seconds = Field(1800, description="how long it waits for a replica that is not up yet")
    stop_timeout_s: Annotated[int, Field(strict=True, ge=1, le=3600)] = Field(
        120, description="for requests that run when it is stopped"
    )
    log_level: Literal["debug", "info", "warn", "error"] = "warn"
    extra_args: list[Text] = Field([], description="further options of `smg launch`")

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        for index, argument in enumerate(value):
            option = argument.partition("=")[0]
            # smg's parser takes any unambiguous beginning of an option for the option.
            refused = next((REFUSED_ARGS[o] for o in REFUSED_ARGS if _means(option, o)), None)
            if refused is not None:
                raise AtKey((index,), option, f"options of smg that have no key: {refused}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.port == self.metrics_port:
            raise AtKey(("metrics_port",), self.metrics_port, "a port of its own (port has it)")
        return self


def check_gateways(cluster: Cluster, taken: dict[tuple[str | None, int], str]) -> None:
    """The rules that need the rest of the file. `taken` says who has which port; raises AtKey."""
    services = {service.name: service for service in cluster.services}
    names = set(services)
    for index, gateway in enumerate(cluster.gateways):
        at = ("gateways", index)
        if gateway.name in names:
            raise AtKey((*at, "name"), gateway.name, "a name of its own, among the services too")
        names.add(gateway.name)
        service = services.get(gateway.service)
        if service is None:
            raise AtKey((*at, "service"), gateway.service, ", ".join(services))
        if service.arm is Arm.UNSAFE:
            raise AtKey((*at, "service"), gateway.service, "an arm other than unsafe, whose output is wrong")
        known = None if cluster.hosts.inline is None else list(cluster.hosts.inline)
        if known is not None and gateway.host is not None and gateway.host not in known:
            raise AtKey((*at, "host"), gateway.host, ", ".join(known))
        _check_addresses(cluster, gateway, service, at, known)
        host = gateway.host or next(iter(service.hosts or known or ()), None)
        for key in ("port", "metrics_port"):
            port = getattr(gateway, key)
            other = holder(taken, host, port)
            if other is not None:
                raise AtKey((*at, key), port, f"a free port ({other} has it)")
            taken[host, port] = f"gateway {gateway.name}"


def _check_addresses(
    cluster: Cluster, gateway: Gateway, service: Service, at: tuple[str | int, ...], known: list[str] | None
) -> None:
    if not ipaddress.ip_address(gateway.bind).is_loopback and cluster.secrets.api_key is None:
        raise AtKey((*at, "bind"), gateway.bind, "loopback, or set secrets.api_key")
    if not ipaddress.ip_address(service.bind).is_loopback:
        return
    places = service.hosts or known
    home = gateway.host or (places[0] if places else None)
    far = [host for host in places or () if host != home]
    if far:
        raise AtKey(
            (*at, "service"),
            gateway.service,
            f"a service that {home} can reach on {far[0]} too: its bind is {service.bind}, "
            "an address such as 0.0.0.0 is needed there (with secrets.api_key)",
        )


def _means(given: str, option: str) -> bool:
    """Whether argparse could take what was given for the option."""
    return given == option or (len(given) > len("--") and option.startswith(given) and given.startswith("--"))
