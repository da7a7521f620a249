"""What has to be done to one host's containers, by comparing what is wanted with what is there. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ddtree_ops.containers.found import Found
from ddtree_ops.containers.spec import PREVIOUS, ContainerSpec
from ddtree_ops.deploy.layout import Replica


class Action(StrEnum):
    CREATE = "create"
    REPLACE = "replace"
    START = "start"
    RESTART = "restart"
    REMOVE = "remove"
    UNCHANGED = "unchanged"

    @property
    def changes(self) -> bool:
        return self is not Action.UNCHANGED


@dataclass(frozen=True)
class Step:
    """One container on one host.

    spec, replica  null for a container that is to go; a gateway has a spec only
    diff           lines of what would change: `- old`, `+ new`
    """

    host: str
    name: str
    action: Action
    reason: str
    replica: Replica | None = None
    spec: ContainerSpec | None = None
    diff: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "container": self.name,
            "action": self.action.value,
            "reason": self.reason,
            "service": None if self.spec is None else self.spec.service,
            "gpus": [] if self.spec is None else list(self.spec.gpus),
            "argv": [] if self.spec is None else list(self.spec.argv),
            "env": {} if self.spec is None else dict(self.spec.env),
            "image": None if self.spec is None else self.spec.image,
            "config_hash": None if self.spec is None else self.spec.config_hash,
            "diff": list(self.diff),
        }


def steps_of(
    host: str,
    wanted: Sequence[tuple[Replica, ContainerSpec]],
    found: Iterable[Found],
    *,
    known: Iterable[str],
    services: Iterable[str] = (),
    recreate: bool = False,
) -> list[Step]:
    """Steps for a host, in the order of cluster.yaml, removals first.

    wanted    of the services that are worked on
    known     names of everything in cluster.yaml; a container of anything else goes
    services  the only ones that are worked on; empty for all
    recreate  replace also what is equal
    """
    there = {one.name: one for one in found if not one.previous and not one.one_shot}
    names, only, kept = {spec.name for _, spec in wanted}, set(services), set(known)
    replicas = {replica.service.name for replica, _ in wanted}
    steps = []
    for name, one in sorted(there.items()):
        if name in names or (only and one.service not in only):
            continue
        if one.service not in kept:
            steps.append(Step(host, name, Action.REMOVE, f"{one.service} is not in cluster.yaml"))
        elif one.service in replicas or (only and one.service in only):
            steps.append(Step(host, name, Action.REMOVE, f"{one.service} has fewer replicas here"))
    return steps + [
        container_step(host, replica, spec, there.get(spec.name), recreate) for replica, spec in wanted
    ]


def spec_diff(old: Mapping[str, Any] | None, new: ContainerSpec) -> tuple[str, ...]:
    """Lines that say what differs; options stay with their values."""
    if old is None:
        return ()
    fresh = json.loads(json.dumps(asdict(new), default=dict))  # as it comes back from a label
    lines = []
    for key in fresh:
        before, after = _lines(key, old.get(key)), _lines(key, fresh[key])
        if before != after:
            found = difflib.ndiff(before, after)
            lines += [line for line in found if line.startswith(("- ", "+ "))]
    return tuple(lines)


def container_step(
    host: str, replica: Replica | None, spec: ContainerSpec, found: Found | None, recreate: bool
) -> Step:
    """What has to be done to one container; a gateway's is no replica."""

    def step(action: Action, reason: str, diff: tuple[str, ...] = ()) -> Step:
        return Step(host, spec.name, action, reason, replica, spec, diff)

    if found is None:
        return step(Action.CREATE, "it is not there")
    if found.state == "created":
        return step(Action.CREATE, "it was created and never ran")
    if found.config_hash != spec.config_hash:
        diff = spec_diff(found.spec, spec)
        return step(Action.REPLACE, _what_changed(diff) or "its configuration changed", diff)
    if recreate:
        return step(Action.REPLACE, "asked for")
    if not found.running:
        return step(Action.START, found.outcome)
    if found.health == "unhealthy":
        return step(Action.RESTART, "it is unhealthy")
    return step(Action.UNCHANGED, found.outcome)


def _what_changed(diff: Sequence[str]) -> str:
    keys = dict.fromkeys(line[2:].partition(" ")[0].rstrip(":") for line in diff)
    return f"changed: {', '.join(keys)}" if keys else ""


def _lines(key: str, value: Any) -> list[str]:
    if key == "argv":
        return [f"argv {text}" for text in _options([str(part) for part in value or ()])]
    if isinstance(value, Mapping):
        return [f"{key} {name}={inner}" for name, inner in sorted(value.items())]
    if isinstance(value, list | tuple):
        return [f"{key} {_flat(inner)}" for inner in value]
    return [] if value is None else [f"{key} {value}"]


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={inner}" for name, inner in sorted(value.items()))
    return str(value)


def _options(argv: Sequence[str]) -> list[str]:
    """Options with their values, one a line."""
    found: list[str] = []
    for part in argv:
        if found and not part.startswith("-") and found[-1].startswith("-"):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found


def previous_name(name: str) -> str:
    return f"{name}{PREVIOUS}"
