"""The Docker engine of one host: containers, volumes, and through its base class images.

Containers are made in one way only: GPUs by UUID, an init process (Python as process 1 ignores SIGTERM),
never privileged, logs in files of bounded size that are kept before anything is removed. Only what carries
our labels is ever listed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ddtree_ops.containers.exec import run_exec
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.found import EngineInfo, Found, OneShot, VolumeFound, container_found, engine_info
from ddtree_ops.containers.images import Images
from ddtree_ops.containers.logs import redacted_lines, tail_text, write_dump
from ddtree_ops.containers.spec import LABEL_CLUSTER, LABEL_ONE_SHOT, ContainerSpec, Healthcheck
from ddtree_ops.containers.transport import Wire
from ddtree_ops.errors import BadInput, DdtreeError

CREATE_S = 120.0
#: The first start after a boot may wait for the driver.
START_S = 180.0
REMOVE_S = 300.0
DUMP_S = 900.0
#: Above a container's own stop timeout.
STOP_MARGIN_S = 30.0
STOP_DEFAULT_S = 120
#: Of a one-shot's output.
OUTPUT_LINES = 2000
NANOSECONDS = 1_000_000_000
GIB = 1 << 30


class Engine(Images):
    """One host's engine. Every method may raise HostUnreachable and DockerFailure.

    log_folder  where logs go before their container is removed
    """

    def __init__(self, wire: Wire, *, log_folder: Path | None = None) -> None:
        super().__init__(wire)
        self._log_folder = log_folder

    def info(self) -> EngineInfo:
        with self._call("engine information") as client:
            return engine_info(client.info())

    def ours(self, cluster: str) -> list[Found]:
        """All containers of a cluster in any state, previous ones and one-shots included, by name."""
        with self._call("list of containers") as client:
            entries = client.containers(all=True, filters={"label": f"{LABEL_CLUSTER}={cluster}"})
        found = [self.find(str(entry["Id"])) for entry in entries]
        return sorted((one for one in found if one is not None), key=lambda one: one.name)

    def find(self, name: str) -> Found | None:
        """A container by name or id; null where there is none."""
        try:
            with self._call(f"state of {name}") as client:
                return container_found(client.inspect_container(name))
        except DockerFailure as failure:
            if failure.status == 404:
                return None
            raise

    def create(self, spec: ContainerSpec, secrets: Mapping[str, str] | None = None) -> str:
        """Create the container and return its id; it is not started.

        secrets  the values of `spec.secret_env`; they go to the engine and nowhere else
        A leftover of that name that never ran is removed first.
        """
        return self._create(spec, secrets or {}, {})

    def start(self, name: str) -> None:
        """Start a container. One that was only just created and cannot start is removed again."""
        try:
            with self._call(f"start of {name}", START_S) as client:
                client.start(name)
        except DockerFailure:
            with suppress(DdtreeError):
                self._remove_unstarted(name)
            raise

    def stop(self, name: str, timeout_s: int | None = None) -> None:
        """SIGTERM, and SIGKILL after the timeout (null: the container's own). Harmless when it is stopped."""
        limit = timeout_s if timeout_s is not None else self._stop_timeout(name)
        with self._call(f"stop of {name}", limit + STOP_MARGIN_S) as client:
            client.stop(name, timeout=limit)

    def rename(self, old: str, new: str) -> None:
        with self._call(f"rename of {old} to {new}") as client:
            client.rename(old, new)

    def remove(self, name: str, *, log_folder: Path | None = None) -> Path | None:
        """Keep the logs, then remove a stopped container; return where the logs are.

        Null for a container that never ran, or is not there. A running one raises DockerFailure: stop it.
        Logs that cannot be written leave the container in place.
        """
        found = self.find(name)
        if found is None:
            return None
        if found.running:
            raise DockerFailure(
                f"{self.host}: removal of {name}: it runs", remedy="stop it first", status=409
            )
        folder, log = log_folder or self._log_folder, None
        if found.started_at is not None:
            if folder is None:
                raise ValueError(f"{name}: a folder for its logs is needed before it is removed")
            log = self.dump_logs(found.id, folder)
        self._remove(found.id, force=False)
        return log

    def logs(
        self,
        name: str,
        *,
        tail: int | None = None,
        follow: bool = False,
        since: datetime | None = None,
        timestamps: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[bytes]:
        """Lines of both streams, each with its line end, without what looks like a secret.

        follow  until the container ends, the generator is closed or the time is up; when SSH is cut
                HostUnreachable is raised, so that an end is an end
        """
        limit = timeout_s if timeout_s is not None or follow else DUMP_S
        with self._call(f"logs of {name}", limit) as client:
            stream: Iterable[bytes] = client.logs(
                name,
                stream=True,
                follow=follow,
                timestamps=timestamps,
                tail="all" if tail is None else tail,
                since=since.timestamp() if since else None,
            )
            yield from redacted_lines(stream)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines as text; empty where the container is gone."""
        try:
            return tail_text(self.logs(name, tail=lines), lines)
        except DockerFailure as failure:
            if failure.status == 404:
                return ""
            raise

    def dump_logs(self, name: str, folder: Path) -> Path:
        """Write everything that the container said into a file of its own (0600) and return that."""
        found = self.find(name)
        if found is None:
            raise DockerFailure(f"{self.host}: logs of {name}: there is no such container", status=404)
        return write_dump(folder, found, self.logs(found.id, timestamps=True))

    def exec(self, name: str, argv: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """Run a command in a running container: its exit code and the output of both streams, redacted.

        At the timeout DockerFailure is raised; the engine offers no way to end the command itself.
        """
        with self._call(f"{argv[0]} in {name}", timeout_s) as client:
            return run_exec(client, name, argv)

    def run_once(
        self, spec: ContainerSpec, secrets: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> OneShot:
        """Run a container to its end and remove it, also after the timeout, an error or Ctrl-C.

        Raises DockerFailure with the end of the output when it takes too long.
        """
        self._sweep_one_shot(spec.name)
        try:
            identity = self._create(spec, secrets or {}, {LABEL_ONE_SHOT: "true"})
            self.start(identity)
            code = self._wait(spec.name, identity, timeout_s)
            return OneShot(code, tail_text(self.logs(identity), OUTPUT_LINES))
        finally:
            # Without a word where it fails: the error that matters is on its way, and the next run sweeps.
            with suppress(DdtreeError):
                self._sweep_one_shot(spec.name)

    def ensure_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Make a named volume; one that exists is left as it is."""
        with self._call(f"volume {name}") as client:
            client.create_volume(name, labels=dict(labels))

    def remove_volume(self, name: str) -> bool:
        """False where there is none. Raises DockerFailure while a container uses it."""
        try:
            with self._call(f"removal of volume {name}", REMOVE_S) as client:
                client.remove_volume(name)
        except DockerFailure as failure:
            if failure.status == 404:
                return False
            raise
        return True

    def our_volumes(self, cluster: str) -> list[VolumeFound]:
        with self._call("list of volumes") as client:
            answer = client.volumes(filters={"label": f"{LABEL_CLUSTER}={cluster}"})
        found = [
            VolumeFound(str(one["Name"]), dict(one.get("Labels") or {})) for one in answer["Volumes"] or ()
        ]
        return sorted(found, key=lambda volume: volume.name)

    def _create(self, spec: ContainerSpec, secrets: Mapping[str, str], labels: Mapping[str, str]) -> str:
        missing = [name for name in spec.secret_env if not secrets.get(name)]
        if missing:
            raise BadInput(f"container {spec.name}: no value for the secret {', '.join(missing)}")
        self._remove_unstarted(spec.name)
        for mount in spec.mounts:
            if not mount.source.startswith("/"):
                self.ensure_volume(mount.source, {LABEL_CLUSTER: spec.cluster})
        with self._call(f"creation of {spec.name}", CREATE_S) as client:
            answer = client.create_container(
                spec.image,
                command=list(spec.argv),
                entrypoint=None if spec.entrypoint is None else list(spec.entrypoint),
                name=spec.name,
                environment={**spec.env, **{name: secrets[name] for name in spec.secret_env}},
                labels={**spec.labels, **labels},
                user=spec.user,
                stop_signal="SIGTERM",
                stop_timeout=spec.stop_timeout_s,
                healthcheck=_healthcheck(spec.healthcheck),
                host_config=client.create_host_config(**_host_options(spec)),
                use_config_proxy=False,  # a container may not depend on who makes it
            )
        return str(answer["Id"])

    def _stop_timeout(self, name: str) -> int:
        with self._call(f"state of {name}") as client:
            timeout = client.inspect_container(name)["Config"].get("StopTimeout")
        return STOP_DEFAULT_S if timeout is None else int(timeout)

    def _remove_unstarted(self, name: str) -> None:
        """What a failed start leaves: the engine made the container and could not run it."""
        found = self.find(name)
        if found is not None and found.state == "created" and found.started_at is None:
            self._remove(found.id, force=False)

    def _sweep_one_shot(self, name: str) -> None:
        found = self.find(name)
        if found is not None and found.one_shot:
            self._remove(found.id, force=True)

    def _remove(self, identity: str, *, force: bool) -> None:
        try:
            with self._call(f"removal of {identity[:12]}", REMOVE_S) as client:
                client.remove_container(identity, v=True, force=force)
        except DockerFailure as failure:
            if failure.status != 404:
                raise

    def _wait(self, name: str, identity: str, timeout_s: float) -> int:
        started = time.monotonic()
        try:
            with self._call(f"end of {name}", timeout_s) as client:
                return int(client.wait(identity)["StatusCode"])
        except DockerFailure as failure:
            if not failure.timed_out:
                raise
            said = self.log_tail(identity)
            raise DockerFailure(
                f"{self.host}: {name} did not end in {time.monotonic() - started:.0f} s and was stopped"
                + (f"; the end of its output:\n{said}" if said else ""),
                timed_out=True,
            ) from failure


def _host_options(spec: ContainerSpec) -> dict[str, Any]:
    from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

    options: dict[str, Any] = {
        "init": True,
        "privileged": False,
        "network_mode": spec.network,
        "shm_size": spec.shm_gib * GIB,
        "restart_policy": {"Name": spec.restart},
        "log_config": LogConfig(
            type=LogConfig.types.JSON,
            config={"max-size": f"{spec.log_max_mib}m", "max-file": str(spec.log_files)},
        ),
        "ulimits": [Ulimit(name=name, soft=limit, hard=limit) for name, limit in spec.ulimits.items()],
        "cap_add": list(spec.cap_add),
        "mounts": [
            Mount(
                target=mount.target,
                source=mount.source,
                type="bind" if mount.source.startswith("/") else "volume",
                read_only=mount.read_only,
            )
            for mount in spec.mounts
        ],
    }
    if spec.gpus:
        options["device_requests"] = [DeviceRequest(device_ids=list(spec.gpus), capabilities=[["gpu"]])]
    return options


def _healthcheck(check: Healthcheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {
        "test": ["CMD", *check.argv],
        "interval": int(check.interval_s * NANOSECONDS),
        "timeout": int(check.timeout_s * NANOSECONDS),
        "retries": check.retries,
        "start_period": int(check.start_period_s * NANOSECONDS),
    }
