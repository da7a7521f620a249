"""From a gateway of cluster.yaml to the container that runs it: smg's options and the replicas' addresses.

Pure. Options are those of `smg launch` 1.13.0; keys are not among them (see entry_point.py).
"""

from __future__ import annotations

import ipaddress
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.containers.spec import ContainerSpec, Healthcheck
from ddtree_ops.deploy.layout import services_on
from ddtree_ops.deploy.render import KEY_VARIABLE, loopback
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.inventory import Inventory
from ddtree_ops.schemas.cluster import Cluster, Service
from ddtree_ops.schemas.gateway import Gateway

#: A host's variable for the address at which other hosts reach it, where that is not the one for SSH.
ADDRESS_VARIABLE = "ddtree_address"
#: How often smg looks for a replica that is not up yet, seconds.
STARTUP_CHECK_S = 2
#: What an idle smg takes to end on top of its grace period: 7 s on a busy machine with two cores.
STOP_MARGIN_S = 20


@dataclass(frozen=True)
class Worker:
    """A replica as the gateway sees it: `url` is reached from the gateway's host."""

    host: str
    port: int
    url: str


def render_gateway(cluster: Cluster, gateway: Gateway, inventory: Inventory, image: str) -> ContainerSpec:
    """The gateway's container.

    inventory  the whole one: a gateway fronts all replicas, whatever hosts are worked on
    image      id of the gateway's image on its host
    Raises BadInput for replicas that it cannot reach.
    """
    workers = workers_of(cluster, gateway, inventory)
    return ContainerSpec(
        name=f"{cluster.name}-{gateway.name}-0",
        cluster=cluster.name,
        service=gateway.name,
        replica=0,
        image=image,
        argv=tuple(smg_options(gateway, [worker.url for worker in workers])),
        env={"PYTHONUNBUFFERED": "1"},
        secret_env=(KEY_VARIABLE,) if cluster.secrets.api_key is not None else (),
        shm_gib=1,
        healthcheck=_healthcheck(gateway),
        stop_timeout_s=gateway.stop_timeout_s + STOP_MARGIN_S,
    )


def smg_options(gateway: Gateway, workers: Sequence[str]) -> list[str]:
    """The options of `smg launch`, without keys; `workers` are base addresses."""
    health = gateway.health
    options: dict[str, object] = {
        "--host": gateway.bind,
        "--port": gateway.port,
        "--policy": gateway.policy.value,
        "--cache-threshold": gateway.cache_threshold,
        "--prometheus-host": gateway.metrics_bind,
        "--prometheus-port": gateway.metrics_port,
        "--max-concurrent-requests": -1 if gateway.max_concurrent is None else gateway.max_concurrent,
        "--queue-size": gateway.queue,
        "--queue-timeout-secs": gateway.queue_timeout_s,
        "--request-timeout-secs": gateway.request_timeout_s,
        # smg counts attempts: one more than retries.
        "--retry-max-retries": gateway.retries + 1,
        "--health-check-endpoint": health.path,
        "--health-check-interval-secs": health.interval_s,
        "--health-check-timeout-secs": health.timeout_s,
        "--health-failure-threshold": health.failures,
        "--health-success-threshold": health.successes,
        "--worker-startup-timeout-secs": math.ceil(gateway.start_timeout_s),
        "--worker-startup-check-interval": STARTUP_CHECK_S,
        "--shutdown-grace-period-secs": gateway.stop_timeout_s,
        # Prompts and answers stay nowhere, and no tokenizer is looked for, here or on the Hub.
        "--history-backend": "none",
        "--log-level": gateway.log_level,
    }
    argv = [str(part) for pair in options.items() for part in pair]
    return [*argv, "--disable-tokenizer-autoload", *gateway.extra_args, "--worker-urls", *workers]


def workers_of(cluster: Cluster, gateway: Gateway, inventory: Inventory) -> list[Worker]:
    """All replicas of the gateway's service, hosts in the inventory's order. Raises BadInput."""
    service = next(one for one in cluster.services if one.name == gateway.service)
    home = home_of(cluster, gateway, inventory)
    found = []
    for host in inventory.hosts:
        if service not in services_on(cluster, host.name):
            continue
        address = str(host.variables.get(ADDRESS_VARIABLE, host.address))
        near = _reach(service, home == host.name, address)
        if near is None:
            raise BadInput(
                f"gateways.{gateway.name}.service: found {service.name}, which binds to {service.bind} on "
                f"{host.name}, allowed: an address that {home} can reach",
                remedy=f"set bind of {service.name} to 0.0.0.0 and secrets.api_key, or run it on {home} only",
            )
        found += [Worker(host.name, port, f"http://{_bracketed(near)}:{port}") for port in service.ports]
    return found


def as_made(gateway: Gateway, argv: Sequence[str]) -> tuple[Gateway, list[str]]:
    """The gateway as a container of it was made: where it listens, and the replicas that it was given."""
    given = dict(itertools.pairwise(argv))
    was = {
        key: kind(given[option])
        for key, option, kind in (
            ("bind", "--host", str),
            ("port", "--port", int),
            ("metrics_bind", "--prometheus-host", str),
            ("metrics_port", "--prometheus-port", int),
        )
        if option in given
    }
    workers = list(argv[argv.index("--worker-urls") + 1 :]) if "--worker-urls" in argv else []
    return gateway.model_copy(update=was), workers


def home_of(cluster: Cluster, gateway: Gateway, inventory: Inventory) -> str:
    """The host that the gateway runs on."""
    service = next(one for one in cluster.services if one.name == gateway.service)
    return gateway.host or next(name for name in inventory.names if service in services_on(cluster, name))


def _reach(service: Service, same_host: bool, address: str) -> str | None:
    """Where the gateway finds a replica; null where it cannot."""
    bind = ipaddress.ip_address(service.bind)
    if same_host:
        return loopback(service.bind)
    if bind.is_loopback:
        return None
    return address if bind.is_unspecified else service.bind


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _healthcheck(gateway: Gateway) -> Healthcheck:
    """`/readiness` answers 503 while no replica is healthy."""
    url = f"http://{_bracketed(loopback(gateway.bind))}:{gateway.port}/readiness"
    code = f"from urllib.request import urlopen; urlopen('{url}', timeout=4)"
    return Healthcheck(("python3", "-c", code), interval_s=15.0, start_period_s=gateway.start_timeout_s)
