"""Captures of real hosts: the role `facts`, run through Ansible."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadEnvironment
from ddtree_ops.hosts.inventory import Inventory, load_inventory
from ddtree_ops.hosts.runner import Ansible, Event, SshOptions
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.schemas.cluster import Cluster


class AnsibleHosts:
    """Reads hosts over SSH, anew at every call of :meth:`captures`: facts are never cached."""

    def __init__(
        self,
        ansible: Ansible,
        names: list[str],
        *,
        paths: list[str],
        deadline_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.names = names
        self._ansible = ansible
        self._paths = paths
        self._deadline_s = deadline_s
        self._on_event = on_event
        self._unreachable: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        folder: Path,
        *,
        limit: list[str],
        on_event: Callable[[Event], None] | None = None,
    ) -> AnsibleHosts:
        """The hosts of a cluster.yaml that stands in `folder`, or those of them that are named."""
        inventory = load_inventory(cluster, folder).limited(limit)
        paths = [cluster.paths.models, cluster.paths.state]
        ansible = ansible_for(cluster, folder, inventory)
        deadline = cluster.deadlines.facts
        return cls(ansible, inventory.names, paths=paths, deadline_s=deadline, on_event=on_event)

    def captures(self) -> Mapping[str, Mapping[str, Any]]:
        """What the probe printed, by host. Raises JobFailed when Ansible itself fails.

        A host on which the probe cannot run (no sudo, no Python) keeps no other from being read.
        """
        outcome = self._ansible.run(
            "facts.yml",
            variables={"facts_paths": self._paths},
            deadline_s=self._deadline_s,
            on_event=self._on_event,
        )
        key = "facts_capture"
        found = {name: facts[key] for name, facts in outcome.facts.items() if key in facts}
        self._unreachable = {name: f"unreachable: {reason}" for name, reason in outcome.unreachable.items()}
        self._unreachable |= {name: f"cannot be read: {reason}" for name, reason in outcome.failed.items()}
        if set(outcome.hosts) - set(found) - set(self._unreachable):
            outcome.require_ok()
        return found

    def unreachable(self) -> Mapping[str, str]:
        return self._unreachable


def ansible_for(
    cluster: Cluster,
    folder: Path,
    inventory: Inventory,
    *,
    secrets: Mapping[str, str] | None = None,
    log_folder: Path | None = None,
) -> Ansible:
    """A runner with the cluster's SSH settings. Raises BadInput for an unreadable secret.

    secrets  of tasks, by variable of the environment
    """
    return Ansible(inventory, ssh=ssh_options(cluster, folder), secrets=secrets, log_folder=log_folder)


def ssh_options(cluster: Cluster, folder: Path) -> SshOptions:
    """How the cluster's hosts are reached. Raises BadInput for an unreadable secret."""
    key = cluster.ssh.private_key
    if key is not None and not _under(folder, key).is_file():
        raise BadEnvironment(f"ssh.private_key: no such file: {_under(folder, key)}")
    known = cluster.ssh.known_hosts
    return SshOptions(
        known_hosts=_under(folder, known) if known else None,
        private_key=_under(folder, key) if key else None,
        connect_timeout_s=cluster.ssh.connect_timeout_s,
        become=cluster.ssh.become,
        become_password=resolve_secret(cluster.ssh.become_password, key="ssh.become_password", folder=folder),
    )


def _under(folder: Path, path: Path) -> Path:
    return Path(os.path.abspath(folder / path.expanduser()))  # noqa: PTH100 - links in ~/.ssh stay links
