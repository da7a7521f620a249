"""What a container of ours is, in full: two equal specs are the same container, so nothing is to be done.

The hash of everything that was asked for stands on the container as a label. `up` compares hashes and leaves
an equal container alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Labels by which containers of ours are found and judged; others on a host are never touched.
LABEL_CLUSTER = "ddtree.cluster"
LABEL_SERVICE = "ddtree.service"
LABEL_REPLICA = "ddtree.replica"
LABEL_HASH = "ddtree.config-hash"
#: The spec itself as JSON, so that a plan can show what would change and a rollback knows the old port.
LABEL_SPEC = "ddtree.spec"
#: On a container that runs one command and is removed.
LABEL_ONE_SHOT = "ddtree.one-shot"
#: A container that was replaced is stopped, gets this at the end of its name, and is kept for a rollback.
PREVIOUS = ".previous"


@dataclass(frozen=True)
class Mount:
    """A folder of the host, or a named volume, inside a container."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Healthcheck:
    """Asked by the engine itself, for `docker ps`; readiness has checks of its own. Seconds."""

    argv: tuple[str, ...]
    interval_s: float = 10.0
    timeout_s: float = 5.0
    retries: int = 3
    start_period_s: float = 600.0


@dataclass(frozen=True)
class ContainerSpec:
    """One container.

    name          unique on its host: CLUSTER-SERVICE-REPLICA
    image         id of the image (`sha256:...`), never a tag, which could move
    argv          after the image's entry point
    entrypoint    instead of the image's own
    env           variables that are no secrets
    secret_env    names of variables whose values are handed over at creation; not part of the hash or of any
                  output
    gpus          UUIDs, empty for none
    network       `host`, so that a service binds to one address of its host alone
    restart       the engine's policy; `no`, because a server that restarts by itself hides why it died
    log_max_mib, log_files  the engine keeps so many files of that size
    stop_timeout_s  SGLang drains on SIGTERM; killed earlier it can leave GPU memory held
    """

    name: str
    cluster: str
    service: str
    replica: int
    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    gpus: tuple[str, ...] = ()
    shm_gib: int = 32
    ulimits: Mapping[str, int] = field(default_factory=dict)
    cap_add: tuple[str, ...] = ()
    user: str | None = None
    network: str = "host"
    healthcheck: Healthcheck | None = None
    stop_timeout_s: int = 120
    entrypoint: tuple[str, ...] | None = None
    restart: str = "no"
    log_max_mib: int = 64
    log_files: int = 3

    @property
    def config_hash(self) -> str:
        """sha256 over canonical JSON of all fields."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    @property
    def labels(self) -> dict[str, str]:
        return {
            LABEL_CLUSTER: self.cluster,
            LABEL_SERVICE: self.service,
            LABEL_REPLICA: str(self.replica),
            LABEL_HASH: self.config_hash,
            LABEL_SPEC: self._canonical(),
        }

    def public(self) -> dict[str, Any]:
        """The spec as data for plans and results. Holds no secret by construction."""
        return {**asdict(self), "config_hash": self.config_hash}

    def _canonical(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), default=dict)
