"""What an engine has, as far as anybody here needs to know: an allow-list over its answers.

`docker inspect` shows every variable of a container, secrets included; nothing of that passes this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ddtree_ops.containers.spec import (
    LABEL_CLUSTER,
    LABEL_HASH,
    LABEL_ONE_SHOT,
    LABEL_REPLICA,
    LABEL_SERVICE,
    LABEL_SPEC,
    PREVIOUS,
)
from ddtree_ops.redact import redact_text

RUNNING = frozenset({"running", "paused", "restarting"})
#: States in which the exit code means something.
ENDED = frozenset({"exited", "dead", "removing"})
#: Variables of images that are of use; whoever built an image may have left others in it.
IMAGE_VARIABLES = frozenset(
    {"CUDA_VERSION", "NVIDIA_REQUIRE_CUDA", "NVIDIA_VISIBLE_DEVICES", "PYTHON_VERSION"}
)


@dataclass(frozen=True)
class Found:
    """A container as its engine describes it now.

    image      id of the image (`sha256:...`)
    state      the engine's word: created, running, paused, restarting, removing, exited, dead
    exit_code  once it has ended, else null; 128 + N for signal N
    health     starting, healthy, unhealthy; null without a health check
    error      the engine's reason for not starting it; empty otherwise
    oom        killed by the kernel for want of memory
    previous   replaced, kept for a rollback
    one_shot   ran one command and should be gone
    spec       what was asked for when it was made, as data; null where the label is missing
    """

    name: str
    id: str
    cluster: str | None
    service: str | None
    replica: int | None
    config_hash: str | None
    image: str
    state: str
    exit_code: int | None = None
    health: str | None = None
    error: str = ""
    oom: bool = False
    previous: bool = False
    one_shot: bool = False
    restarts: int = 0
    gpus: tuple[str, ...] = ()
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    spec: Mapping[str, Any] | None = None

    @property
    def running(self) -> bool:
        return self.state in RUNNING

    @property
    def outcome(self) -> str:
        """How it stands, in words: `running (healthy)`, `exited with code 3`, `killed: out of memory`."""
        if self.oom and not self.running:
            return "killed: out of memory"
        if self.exit_code is not None:
            how = f"exited with code {self.exit_code}"
            if self.exit_code > 128:
                how = f"was killed by signal {self.exit_code - 128}"
            return f"{how}: {self.error}" if self.error else how
        if self.error:
            return f"{self.state}: {self.error}"
        return f"{self.state} ({self.health})" if self.health else self.state


@dataclass(frozen=True)
class ImageFound:
    """An image.

    digests  those of registries, `repository@sha256:...`: empty for an image that was built or loaded
    env      of its variables those in IMAGE_VARIABLES
    """

    id: str
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    digests: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class VolumeFound:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineInfo:
    """The engine itself. `driver` is its storage driver, `data_root` a path on its host."""

    version: str
    driver: str
    data_root: str
    runtimes: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class OneShot:
    """What one command in a container came to; `output` is the end of both of its streams, redacted."""

    exit_code: int
    output: str


def container_found(answer: Mapping[str, Any]) -> Found:
    """From `inspect` of a container."""
    config, state, host = (answer.get(key) or {} for key in ("Config", "State", "HostConfig"))
    labels: Mapping[str, str] = config.get("Labels") or {}
    name, word = str(answer.get("Name", "")).removeprefix("/"), str(state.get("Status", "unknown"))
    replica = labels.get(LABEL_REPLICA, "")
    health = (state.get("Health") or {}).get("Status")
    return Found(
        name=name,
        id=str(answer["Id"]),
        cluster=labels.get(LABEL_CLUSTER),
        service=labels.get(LABEL_SERVICE),
        replica=int(replica) if replica.isdigit() else None,
        config_hash=labels.get(LABEL_HASH),
        image=str(answer.get("Image", "")),
        state=word,
        exit_code=int(state.get("ExitCode", 0)) if word in ENDED else None,
        health=str(health) if health and health != "none" else None,
        error=redact_text(str(state.get("Error") or "")),
        oom=bool(state.get("OOMKilled")),
        previous=name.endswith(PREVIOUS),
        one_shot=LABEL_ONE_SHOT in labels,
        restarts=int(answer.get("RestartCount") or 0),
        gpus=_gpus(host),
        created_at=_time(answer.get("Created")),
        started_at=_time(state.get("StartedAt")),
        finished_at=_time(state.get("FinishedAt")),
        spec=_spec(labels.get(LABEL_SPEC)),
    )


def image_found(answer: Mapping[str, Any]) -> ImageFound:
    """From `inspect` of an image."""
    config = answer.get("Config") or {}
    variables = (str(entry).partition("=") for entry in config.get("Env") or ())
    return ImageFound(
        id=str(answer["Id"]),
        tags=tuple(answer.get("RepoTags") or ()),
        labels=dict(config.get("Labels") or {}),
        size=int(answer.get("Size") or 0),
        digests=tuple(answer.get("RepoDigests") or ()),
        env={name: value for name, _, value in variables if name in IMAGE_VARIABLES},
    )


def engine_info(answer: Mapping[str, Any]) -> EngineInfo:
    return EngineInfo(
        version=str(answer.get("ServerVersion", "")),
        driver=str(answer.get("Driver", "")),
        data_root=str(answer.get("DockerRootDir", "")),
        runtimes=tuple(sorted(answer.get("Runtimes") or {})),
        cpus=int(answer.get("NCPU") or 0),
        memory_bytes=int(answer.get("MemTotal") or 0),
    )


def _spec(text: str | None) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _gpus(host: Mapping[str, Any]) -> tuple[str, ...]:
    requests = host.get("DeviceRequests") or ()
    return tuple(gpu for request in requests for gpu in request.get("DeviceIDs") or ())


def _time(text: Any) -> datetime | None:
    """The engine writes the year 1 for never."""
    if not text or str(text).startswith("0001-"):
        return None
    return datetime.fromisoformat(str(text))
