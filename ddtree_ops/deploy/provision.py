"""Hosts made ready by the playbooks: cluster.yaml as variables of the roles, and the run itself.

What is the same on every host goes in as extra variables; what differs goes into the inventory, as variables
of its host. Secrets go through the environment. Roles' variables that have no key in cluster.yaml stay what
the user's inventory says (`LEFT_TO_THE_INVENTORY`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.layout import services_on
from ddtree_ops.deploy.render import loopback, shipped_files
from ddtree_ops.errors import BadInput
from ddtree_ops.gateway.render import home_of
from ddtree_ops.hosts.ansible_facts import ansible_for
from ddtree_ops.hosts.inventory import Host, Inventory
from ddtree_ops.hosts.runner import Event, Outcome
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.schemas.cluster import Checkpoint, Cluster, EngineKind

PLAYBOOK = "site.yml"
HF_TOKEN, GRAFANA_PASSWORD = "HF_TOKEN", "DDTREE_GRAFANA_PASSWORD"
#: Parts of site.yml that `--tags` selects.
TAGS = (
    "preflight",
    "service_host",
    "nvidia_driver",
    "container_runtime",
    "gpu_settings",
    "model_cache",
    "monitoring",
)
#: For clusters without a card nothing of NVIDIA's is installed.
GPU_TAGS = frozenset({"nvidia_driver", "gpu_settings"})
#: Variables of roles that cluster.yaml does not set, by design: set them in the inventory.
LEFT_TO_THE_INVENTORY = frozenset(
    {
        "container_runtime_cdi_file",
        "container_runtime_daemon_options",
        "container_runtime_docker_package",
        "container_runtime_key_url",
        "container_runtime_nvidia_options",
        "container_runtime_repository",
        "container_runtime_root",
        "facts_image",
        "facts_python",
        "facts_timeout",
        "gpu_settings_cmdline",
        "gpu_settings_cpu_governor",
        "gpu_settings_disable_acs",
        "gpu_settings_nvidia_smi",
        "gpu_settings_persistence",
        "gpu_settings_root",
        "gpu_settings_update_grub",
        "model_cache_client",
        "model_cache_delay",
        "model_cache_endpoint",
        "model_cache_group",
        "model_cache_hf",
        "model_cache_manage_client",
        "model_cache_min_free_gib",
        "model_cache_owner",
        "model_cache_retries",
        "monitoring_gpu_exporter_image",
        "monitoring_grafana_image",
        "monitoring_manage_services",
        "monitoring_node_exporter_image",
        "monitoring_prometheus_image",
        "monitoring_root",
        "nvidia_driver_loaded_file",
        "nvidia_driver_packages",
        "nvidia_driver_reboot_timeout",
        "nvidia_driver_root",
        "nvidia_driver_update_initramfs",
        "preflight_machines",
        "preflight_min_python",
        "service_host_group",
        "service_host_log_days",
        "service_host_manage_user",
        "service_host_root",
        "service_host_user",
    }
)


def provision(
    cluster: Cluster,
    folder: Path,
    inventory: Inventory,
    *,
    whole: Inventory | None = None,
    revisions: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    check: bool = False,
    log_folder: Path | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Outcome:
    """Run the playbooks on the hosts of the inventory, or with `check` see what they would change.

    whole      all hosts of the cluster, where the inventory was limited: Prometheus asks them all
    revisions  commits by repository, for branches that were resolved
    tags       parts of site.yml; none means all
    Raises BadInput for an unknown tag and an unreadable secret. Failures of hosts are in the outcome.
    """
    everybody = inventory if whole is None else whole
    hosts = [
        Host(host.name, {**host.variables, **host_variables(cluster, host, everybody)})
        for host in inventory.hosts
    ]
    secrets = {
        name: value
        for name, secret, key in (
            (HF_TOKEN, cluster.secrets.hf_token, "secrets.hf_token"),
            (GRAFANA_PASSWORD, cluster.secrets.grafana_password, "secrets.grafana_password"),
        )
        if (value := resolve_secret(secret, key=key, folder=folder)) is not None
    }
    ansible = ansible_for(cluster, folder, Inventory(tuple(hosts)), secrets=secrets, log_folder=log_folder)
    deadlines = cluster.deadlines
    return ansible.run(
        PLAYBOOK,
        variables=variables(cluster, folder, revisions=revisions),
        tags=require_tags(tags),
        check=check,
        deadline_s=deadlines.provision + (deadlines.download if _models(cluster, revisions) else 0),
        on_event=on_event,
    )


def require_tags(tags: Sequence[str]) -> list[str]:
    """The tags. Raises BadInput for one that site.yml lacks: Ansible would run nothing and be content."""
    for tag in tags:
        if tag not in TAGS:
            raise BadInput.at(file=None, key="--tags", found=tag, allowed=", ".join(TAGS))
    return list(tags)


def variables(
    cluster: Cluster, folder: Path, *, revisions: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Extra variables: what is the same on every host. Raises BadInput for an unreadable calibration file."""
    gpus = cluster.engine is EngineKind.SGLANG
    paths, monitoring = cluster.paths, cluster.monitoring
    found: dict[str, Any] = {
        "ddtree_gpus": gpus,
        "ddtree_monitoring": monitoring.enabled,
        "facts_paths": [paths.models, paths.state],
        "preflight_paths": [paths.models, paths.state],
        "preflight_min_free_gib": paths.min_free_gib,
        "service_host_state": paths.state,
        "service_host_models": paths.models,
        "service_host_logs": paths.logs,
        "service_host_files": [
            {"name": name, "content": text} for name, text in sorted(shipped_files(cluster, folder).items())
        ],
        "nvidia_driver_manage": cluster.driver.manage,
        "nvidia_driver_branch": cluster.driver.branch,
        "nvidia_driver_allow_reboot": cluster.driver.allow_reboot,
        "container_runtime_manage": cluster.runtime.manage,
        "container_runtime_toolkit_version": cluster.runtime.toolkit_version,
        "container_runtime_allow_restart": cluster.runtime.allow_restart,
        "gpu_settings_power_cap": cluster.gpu.power_cap_w,
        "model_cache_folder": paths.models,
        "model_cache_venv": f"{paths.state}/hub-client",
        "model_cache_timeout": int(cluster.deadlines.download),
        "model_cache_token_variable": HF_TOKEN,
        "model_cache_models": _models(cluster, revisions),
        "monitoring_folder": f"{paths.state}/monitoring",
        "monitoring_bind": monitoring.bind,
        "monitoring_node_exporter_port": monitoring.node_exporter_port,
        "monitoring_gpu_exporter_port": monitoring.gpu_exporter_port,
        "monitoring_prometheus_port": monitoring.prometheus_port,
        "monitoring_grafana_port": monitoring.grafana_port,
        "monitoring_retention_days": monitoring.retention_days,
        "monitoring_gpus": gpus,
        "monitoring_grafana_password_variable": GRAFANA_PASSWORD,
    }
    if not gpus:
        found["container_runtime_toolkit_packages"] = []
    return found


def host_variables(cluster: Cluster, host: Host, inventory: Inventory) -> dict[str, Any]:
    """Variables of one host: widths of its services, and whether Prometheus is there and what it asks."""
    tp = max((service.tp for service in services_on(cluster, host.name)), default=1)
    server = host.name == (cluster.monitoring.host or inventory.names[0])
    return {
        "gpu_settings_tp": tp,
        "nvidia_driver_disable_hmm": tp > 1,
        "monitoring_server": server,
        "monitoring_services": _targets(cluster, host, inventory) if server else [],
        "monitoring_gateways": _gateways(cluster, host, inventory) if server else [],
        "monitoring_hosts": _exporters(cluster, host, inventory) if server else [],
    }


def _models(cluster: Cluster, revisions: Mapping[str, str] | None) -> list[dict[str, str]]:
    wanted = [model for model in (cluster.model, cluster.drafter) if model is not None]
    return [
        {"repo": model.repo, "revision": _revision(model, revisions or {})}
        for model in wanted
        if model.repo is not None
    ]


def _revision(model: Checkpoint, revisions: Mapping[str, str]) -> str:
    return model.revision if model.pinned else revisions.get(model.repo or "", model.revision)


def _targets(cluster: Cluster, server: Host, inventory: Inventory) -> list[dict[str, Any]]:
    """Services that Prometheus can reach: its own host's, and others' that listen beyond loopback."""
    found = []
    for host in inventory.hosts:
        for service in services_on(cluster, host.name):
            address = _reachable(service.bind, host, server)
            if address is None:
                continue
            for index, port in enumerate(service.ports):
                found.append(
                    {
                        "name": f"{host.name}-{service.name}-{index}",
                        "arm": service.arm.value,
                        "budget": service.budget,
                        "address": f"{address}:{port}",
                    }
                )
    return found


def _gateways(cluster: Cluster, server: Host, inventory: Inventory) -> list[dict[str, str]]:
    """Gateways whose metrics Prometheus can reach, as it is with services."""
    hosts = {host.name: host for host in inventory.hosts}
    found = []
    for gateway in cluster.gateways:
        address = _reachable(gateway.metrics_bind, hosts[home_of(cluster, gateway, inventory)], server)
        if address is not None:
            where = f"{address}:{gateway.metrics_port}"
            found.append({"name": gateway.name, "service": gateway.service, "address": where})
    return found


def _exporters(cluster: Cluster, server: Host, inventory: Inventory) -> list[dict[str, str]]:
    found = []
    for host in inventory.hosts:
        address = _reachable(cluster.monitoring.bind, host, server)
        if address is not None:
            found.append({"name": host.name, "address": address})
    return found


def _reachable(bind: str, host: Host, server: Host) -> str | None:
    """The address by which the server's host reaches what binds there; null for another host's loopback."""
    address = ipaddress.ip_address(bind)
    if host.name == server.name:
        return _bracketed(loopback(bind))
    if address.is_loopback:
        return None
    return host.address if address.is_unspecified else _bracketed(bind)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
