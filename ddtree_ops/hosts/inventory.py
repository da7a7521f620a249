"""The hosts of a cluster: an Ansible inventory is the one source; a few may stand in cluster.yaml instead.

An inventory is read by `ansible-inventory` itself, so that every format, group variable and vault works as
usual.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.schemas.cluster import Cluster, Hosts

READ_TIMEOUT_S = 60.0
#: What switches host-key checking off in the options of ssh.
UNCHECKED = re.compile(
    r"StrictHostKeyChecking[= ]*(no|off|accept-new)|UserKnownHostsFile[= ]*/dev/null", re.IGNORECASE
)


@dataclass(frozen=True)
class Host:
    """A host and its Ansible variables, which may hold secrets: they are never shown."""

    name: str
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def address(self) -> str:
        return str(self.variables.get("ansible_host", self.name))


@dataclass(frozen=True)
class Inventory:
    """The hosts of one cluster, in the inventory's order."""

    hosts: tuple[Host, ...]

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def for_ansible(self) -> dict[str, Any]:
        """The same in Ansible's own form."""
        return {"all": {"hosts": {host.name: dict(host.variables) for host in self.hosts}}}

    def limited(self, names: list[str]) -> Inventory:
        """Only the named hosts. Raises BadInput for a name that is not there, or for none."""
        for name in names:
            if name not in self.names:
                raise BadInput.at(file=None, key="--limit", found=name, allowed=", ".join(self.names))
        return Inventory(tuple(host for host in self.hosts if host.name in names)) if names else self


def load_inventory(cluster: Cluster, folder: Path) -> Inventory:
    """The cluster's hosts; `folder` is that of cluster.yaml.

    Raises BadInput when there are none, for an unknown name in a service, and when host keys are not checked.
    """
    inventory = _inline(cluster.hosts) if cluster.hosts.inline else _from_ansible(cluster.hosts, folder)
    for host in inventory.hosts:
        _require_host_keys(host)
    known = set(inventory.names)
    for service in cluster.services:
        unknown = sorted(set(service.hosts or ()) - known)
        if unknown:
            key = f"services.{service.name}.hosts"
            raise BadInput.at(file=None, key=key, found=unknown[0], allowed=", ".join(inventory.names))
    for gateway in cluster.gateways:
        if gateway.host is not None and gateway.host not in known:
            key = f"gateways.{gateway.name}.host"
            raise BadInput.at(file=None, key=key, found=gateway.host, allowed=", ".join(inventory.names))
    return inventory


def read_inventory(source: Path, group: str = "all") -> Inventory:
    """The hosts of one group of an inventory file or folder. Raises BadInput."""
    if not source.exists():
        allowed = "an inventory file or folder that exists"
        raise BadInput.at(file=None, key="hosts.inventory", found=str(source), allowed=allowed)
    answer = _ansible_inventory(source)
    names = list(dict.fromkeys(_members(answer, group)))
    if not names:
        groups = ", ".join(sorted(name for name in answer if name != "_meta"))
        raise BadInput(f"{source}: hosts.group: found no host in {group!r}, allowed: one of {groups}")
    variables = answer.get("_meta", {}).get("hostvars", {})
    return Inventory(tuple(Host(name, variables.get(name, {})) for name in names))


def _inline(hosts: Hosts) -> Inventory:
    found = []
    for name, host in (hosts.inline or {}).items():
        given = {"ansible_host": host.address, "ansible_user": host.user, "ansible_port": host.port}
        variables = {key: value for key, value in given.items() if value is not None}
        found.append(Host(name, {**host.vars, **variables}))
    return Inventory(tuple(found))


def _from_ansible(hosts: Hosts, folder: Path) -> Inventory:
    assert hosts.inventory is not None
    return read_inventory(folder / hosts.inventory.expanduser(), hosts.group)


def _ansible_inventory(source: Path) -> dict[str, Any]:
    program = Path(sys.executable).with_name("ansible-inventory")
    if not program.exists():
        raise BadEnvironment(
            "ansible-inventory is not installed beside this Python", remedy="pip install 'ddtree[deploy]'"
        )
    argv = [str(program), "-i", str(source), "--list"]
    env = {**os.environ, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True", "ANSIBLE_NOCOLOR": "1"}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=READ_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"{source}: ansible-inventory gave no answer in {READ_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("[ERROR]: ") if lines else f"exit status {done.returncode}"
        raise BadInput(f"{source}: ansible-inventory cannot read it: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _members(answer: Mapping[str, Any], group: str) -> Iterator[str]:
    entry = answer.get(group, {})
    yield from entry.get("hosts", ())
    for child in entry.get("children", ()):
        yield from _members(answer, child)


def _require_host_keys(host: Host) -> None:
    for name, value in host.variables.items():
        off = name.endswith("host_key_checking") and str(value).lower() in {"false", "no", "0"}
        unchecked = "ssh" in name and isinstance(value, str) and UNCHECKED.search(value)
        if off or unchecked:
            raise BadInput(
                f"host {host.name}: {name}: found host-key checking switched off, allowed: on",
                remedy="add the host's key to known_hosts (ssh-keyscan, then compare the fingerprint)",
            )
