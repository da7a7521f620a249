"""``cluster.yaml``: the hosts, the models and the services that `ddtree deploy` brings up.

The commented template beside this module (`cluster.template.yaml`) shows every key; `cluster.schema.json` is
the published JSON Schema. Budgets count nodes without the root. Paths on hosts are absolute; paths on the
operator's machine are relative to cluster.yaml.
"""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ddtree_ops.config_file import AtKey
from ddtree_ops.schemas.arms import BUDGETS, Arm, Builder
from ddtree_ops.schemas.fields import (
    EnvName,
    HostName,
    Name,
    Port,
    RemotePath,
    Seconds,
    Text,
    an_address,
    holder,
)
from ddtree_ops.schemas.gateway import Gateway, check_gateways
from ddtree_ops.schemas.sweep import StrictModel

CLUSTER_SCHEMA = 1

#: Options that ddtree sets itself, or that would put a secret into argv.
REFUSED_ARGS = {
    "--api-key": "secrets.api_key",
    "--admin-api-key": "secrets.api_key",
    "--arm": "arm",
    "--budget": "budget",
    "--config": "secrets.api_key",
    "--drafter": "drafter",
    "--host": "bind",
    "--max-running": "max_running_requests",
    "--model": "model",
    "--speculative-algorithm": "arm",
    "--speculative-draft-model-path": "drafter",
    "--speculative-num-draft-tokens": "budget",
    "--port": "port",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--model-path": "model",
    "--revision": "model.revision",
    "--max-running-requests": "max_running_requests",
    "--context-length": "context_length",
    "--mem-fraction-static": "mem_fraction",
}
SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "APIKEY", "CREDENTIAL")


class EngineKind(StrEnum):
    SGLANG = "sglang"
    REFERENCE = "reference"  # the CPU engine: for rehearsals on hosts without a GPU


class Scratch(StrEnum):
    """What verification keeps for each tree node until the accepted path is known."""

    STASH = "stash"  # the recurrent layers' inputs, replayed at commit
    SNAPSHOTS = "snapshots"  # a whole recurrent state for each node


class InlineHost(StrictModel):
    """A host named here instead of in an inventory."""

    address: Text | None = Field(None, description="default: the host's name")
    user: Text | None = None
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = None
    vars: dict[str, Any] = Field({}, description="further Ansible variables of the host")


class Hosts(StrictModel):
    """Where the services run: an Ansible inventory (the one source) or, for a few hosts, a list here."""

    inventory: Path | None = Field(None, description="an inventory file or folder, relative to cluster.yaml")
    group: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        "all", description="the inventory's group that belongs to this cluster"
    )
    inline: dict[HostName, InlineHost] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.inventory is None) == (self.inline is None):
            found = "neither" if self.inventory is None else "both"
            raise AtKey((), found, "either inventory or inline")
        if self.inline is not None and self.group != "all":
            raise AtKey(("group",), self.group, "a group only together with an inventory")
        return self


class Ssh(StrictModel):
    """How hosts are reached. Host keys are always checked."""

    known_hosts: Path | None = Field(None, description="default: ~/.ssh/known_hosts")
    private_key: Path | None = Field(
        None, description="default: what ssh itself would use, an agent included"
    )
    connect_timeout_s: Annotated[int, Field(strict=True, ge=1, le=120)] = 10
    become: bool = Field(True, description="use sudo for what needs root")
    become_password: Secret | None = Field(None, description="for sudo; leave out where it asks for none")


class Secret(StrictModel):
    """Where a secret is: never in this file."""

    file: Path | None = Field(None, description="a file of mode 0600, relative to cluster.yaml")
    env: EnvName | None = Field(None, description="a variable of the operator's environment")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise AtKey((), "neither" if self.file is None else "both", "either file or env")
        return self


class Secrets(StrictModel):
    hf_token: Secret | None = Field(None, description="reads the gated drafter")
    api_key: Secret | None = Field(None, description="what clients of the services must send")
    grafana_password: Secret | None = Field(None, description="default: made by the role, kept on the host")


class Gpu(StrictModel):
    """The cards that every host is expected to have."""

    model: Text = Field("RTX PRO 6000 Blackwell", description="part of the name that nvidia-smi prints")
    count: Annotated[int, Field(strict=True, ge=0, le=64)] = 8
    memory_gib: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)] = Field(
        95.6, description="usable memory of one card: what nvidia-smi calls total"
    )
    power_cap_w: Annotated[int, Field(strict=True, ge=100, le=1000)] | None = Field(
        None, description="set on every card; null leaves the cards as they are (they must be equal)"
    )


class Driver(StrictModel):
    """NVIDIA's driver, open kernel modules."""

    manage: bool = Field(True, description="false: check only")
    branch: Annotated[int, Field(strict=True, ge=580, le=999)] = 580
    allow_reboot: bool = Field(False, description="reboot a host when a new driver needs it")


class Runtime(StrictModel):
    """Docker and NVIDIA's container toolkit."""

    manage: bool = Field(True, description="false: check only")
    toolkit_version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+-\d+$")] = "1.18.0-1"
    allow_restart: bool = Field(False, description="restart docker although containers of ours run")
    socket: RemotePath = Field(
        "/var/run/docker.sock", description="Docker's; a host's variable ddtree_docker_socket wins"
    )


ImageReference = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w./:@-]*$", max_length=255)]


class Image(StrictModel):
    """The base of the engine image, or images that are there already."""

    base: Annotated[str, Field(pattern=r"^[a-z0-9]+([._/:-]+[A-Za-z0-9]+)*$", max_length=255)] = (
        "lmsysorg/sglang:v0.5.23"
    )
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        None, description="null: resolved once, then kept in the lock file"
    )
    cuda: Annotated[str, Field(pattern=r"^\d{2}\.\d$")] = Field(
        "13.0", description="the image's CUDA version, compared with the driver's before anything is pulled"
    )
    prebuilt: ImageReference | None = Field(
        None, description="an engine image that is on every host already (id or tag): nothing is built"
    )
    prebuilt_gateway: ImageReference | None = Field(
        None, description="the same for gateways, on their hosts: made of ddtree's gateway.Dockerfile"
    )


class Checkpoint(StrictModel):
    """A model of the Hub at a fixed revision, or a folder on the hosts."""

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")] | None = None
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w./-]{0,99}$")] = Field(
        "main", description="a commit; a branch is resolved once, then kept in the lock file"
    )
    path: RemotePath | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.repo is None) == (self.path is None):
            raise AtKey((), "neither" if self.repo is None else "both", "either repo or path")
        if self.path is not None and self.revision != "main":
            raise AtKey(("revision",), self.revision, "a revision only together with repo")
        return self

    @property
    def pinned(self) -> bool:
        """Whether the revision names one commit."""
        return self.path is not None or (
            len(self.revision) == 40 and set(self.revision) <= set("0123456789abcdef")
        )


class Paths(StrictModel):
    """Folders on the hosts."""

    state: RemotePath = Field("/var/lib/ddtree", description="configuration, lock files, previous versions")
    models: RemotePath = Field("/var/lib/ddtree/models", description="the Hub's cache: weights")
    logs: RemotePath = "/var/log/ddtree"
    min_free_gib: Annotated[int, Field(strict=True, ge=0, le=100_000)] = Field(
        250, description="free space wanted for image, weights and caches before the first download"
    )


class Ulimits(StrictModel):
    """Of a service's container; -1 is unlimited."""

    memlock: Annotated[int, Field(strict=True, ge=-1)] | None = -1
    stack: Annotated[int, Field(strict=True, ge=-1)] | None = 67108864


class Service(StrictModel):
    """One arm with its settings, as one or more replicas on each of its hosts."""

    name: Name
    arm: Arm
    budget: Annotated[int, Field(strict=True)] | None = Field(
        None, description=f"nodes without the root: {', '.join(map(str, BUDGETS))}; for tree arms only"
    )
    builder: Builder | None = Field(None, description="default for tree arms: best-first")
    topk: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        None, description="K, candidates per position; default for tree arms: 16"
    )
    calibration: Path | None = Field(None, description="needed by the calibrated builder")
    scratch: Scratch | None = Field(
        None, description="for ddtree; default: snapshots; stash has not run on a GPU yet"
    )
    allow_hybrid_unsafe: bool = Field(False, description="needed by the arm 'unsafe', whose output is wrong")
    hosts: Annotated[list[HostName], Field(min_length=1)] | None = Field(None, description="default: all")
    gpus: Annotated[list[Annotated[int, Field(strict=True, ge=0, le=63)]], Field(min_length=1)] | None = (
        Field(None, description="indices on each host; excludes replicas")
    )
    replicas: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        None, description="copies on each host, GPUs chosen by ddtree; excludes gpus; default: 1"
    )
    tp: Literal[1, 2, 4, 8] = Field(1, description="GPUs that one replica spans")
    port: Port = Field(description="of the first replica on a host; the next ones count up")
    bind: Text = Field(
        "127.0.0.1", description="an address of the host; others than loopback need an API key"
    )
    max_running_requests: Annotated[int, Field(strict=True, ge=1, le=256)] = 4
    context_length: Annotated[int, Field(strict=True, ge=256, le=1 << 20)] = 32768
    mem_fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        0.85, description="share of a card for weights, KV and states"
    )
    ssm_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the recurrent states")
    attention_backend: Literal["triton", "flashinfer", "trtllm_mha"] = "triton"
    env: dict[EnvName, Text] = Field({}, description="further variables of the container; never secrets")
    extra_args: list[Text] = Field([], description="further options of the engine")
    shm_gib: Annotated[int, Field(strict=True, ge=1, le=512)] = 32
    ulimits: Ulimits = Ulimits()
    stop_timeout_s: Annotated[int, Field(strict=True, ge=1, le=3600)] = 120

    @property
    def width(self) -> int | None:
        """Q, the nodes that a step verifies with the root; null where the arm takes no budget."""
        return None if self.budget is None else self.budget + 1

    @property
    def copies(self) -> int:
        """Replicas on each host."""
        return len(self.gpus) // self.tp if self.gpus is not None else self.replicas or 1

    @property
    def ports(self) -> range:
        return range(self.port, self.port + self.copies)

    @field_validator("bind")
    @classmethod
    def _an_address(cls, value: str) -> str:
        return an_address(value)

    @field_validator("env")
    @classmethod
    def _no_secret_in_env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if any(word in name.upper() for word in SECRET_NAMES):
                raise AtKey((name,), "a name that looks like a secret", "secrets under the key secrets")
        return value

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        for index, argument in enumerate(value):
            key = REFUSED_ARGS.get(argument.partition("=")[0])
            if key is not None:
                raise AtKey(
                    (index,), argument.partition("=")[0], f"options of the engine that have no key: {key}"
                )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_tree_options()
        self._check_placement()
        if self.ports[-1] > 65535:
            raise AtKey(("port",), self.port, f"a port with room for {self.copies} replicas below 65536")
        return self

    def _check_tree_options(self) -> None:
        if not self.arm.takes_budget:
            for key in ("budget", "builder", "topk", "calibration"):
                if getattr(self, key) is not None:
                    raise AtKey((key,), getattr(self, key), f"nothing: {self.arm.value} drafts no tree")
        elif self.budget not in BUDGETS:
            raise AtKey(("budget",), self.budget, ", ".join(map(str, BUDGETS)))
        if self.scratch is not None and self.arm is not Arm.DDTREE:
            raise AtKey(("scratch",), self.scratch.value, "a choice for the arm ddtree only")
        if self.arm is Arm.UNSAFE and not self.allow_hybrid_unsafe:
            raise AtKey(("arm",), "unsafe", "with allow_hybrid_unsafe: true only, since its output is wrong")
        if self.allow_hybrid_unsafe and self.arm is not Arm.UNSAFE:
            raise AtKey(("allow_hybrid_unsafe",), True, "true for the arm unsafe only")
        if (self.builder is Builder.CALIBRATED) != (self.calibration is not None):
            found = None if self.calibration is None else str(self.calibration)
            raise AtKey(
                ("calibration",), found, "a calibration file, with builder: calibrated and only with it"
            )
        if self.arm in {Arm.DDTREE, Arm.UNSAFE} and self.attention_backend != "triton":
            raise AtKey(("attention_backend",), self.attention_backend, "triton, since trees need its mask")

    def _check_placement(self) -> None:
        if self.gpus is None:
            return
        if self.replicas is not None:
            raise AtKey(("replicas",), self.replicas, "either gpus or replicas")
        if len(set(self.gpus)) != len(self.gpus):
            raise AtKey(("gpus",), self.gpus, "each GPU once")
        if len(self.gpus) % self.tp:
            raise AtKey(("gpus",), f"{len(self.gpus)} GPUs", f"a multiple of tp, which is {self.tp}")


class Rotation(StrictModel):
    """Arms take turns on GPUs, so that a card's own speed is not taken for an arm's."""

    enabled: bool = Field(True, description="false: `ddtree deploy up --rotate N` is refused")


class Monitoring(StrictModel):
    """Exporters on every host; Prometheus and Grafana with the ready dashboard on one of them."""

    enabled: bool = True
    host: HostName | None = Field(
        None, description="where Prometheus and Grafana run; default: the first host"
    )
    bind: Text = Field("127.0.0.1", description="of Prometheus and Grafana")
    prometheus_port: Port = 9090
    grafana_port: Port = 3000
    node_exporter_port: Port = 9100
    gpu_exporter_port: Port = 9400
    retention_days: Annotated[int, Field(strict=True, ge=1, le=3650)] = 30


class Deadlines(StrictModel):
    """Seconds that a phase may take before it counts as failed."""

    connect: Annotated[
        Seconds, Field(description="until a host that does not answer when `up` begins has answered")
    ] = 600
    facts: Seconds = 120
    provision: Seconds = 3600
    download: Seconds = 14400
    build: Seconds = 3600
    ready: Seconds = 1200
    stop: Annotated[Seconds, Field(description="until the cards are idle after `down`")] = 300


class Cluster(StrictModel):
    """A whole cluster.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    name: Name
    engine: EngineKind = Field(EngineKind.SGLANG, description="reference: the CPU engine, for rehearsals")
    hosts: Hosts
    ssh: Ssh = Ssh()
    gpu: Gpu = Gpu()
    driver: Driver = Driver()
    runtime: Runtime = Runtime()
    image: Image = Image()
    model: Checkpoint | None = Field(None, description="the target; null: the shipped pair (reference only)")
    drafter: Checkpoint | None = Field(None, description="the DFlash drafter; needed by every arm but ar")
    paths: Paths = Paths()
    secrets: Secrets = Secrets()
    services: Annotated[list[Service], Field(min_length=1, max_length=64)]
    gateways: Annotated[list[Gateway], Field(max_length=64)] = Field([], description="see docs/gateway.md")
    rotation: Rotation = Rotation()
    monitoring: Monitoring = Monitoring()
    deadlines: Deadlines = Deadlines()

    @property
    def tp(self) -> int:
        """The widest service: some checks matter only where GPUs talk to each other."""
        return max(service.tp for service in self.services)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_names()
        self._check_models()
        check_gateways(self, self._check_ports())
        if self.engine is EngineKind.SGLANG:
            self._check_gpus()
        for index, service in enumerate(self.services):
            loopback = ipaddress.ip_address(service.bind).is_loopback
            if not loopback and self.secrets.api_key is None:
                raise AtKey(("services", index, "bind"), service.bind, "loopback, or set secrets.api_key")
            if self.engine is EngineKind.REFERENCE and (service.gpus is not None or service.tp > 1):
                key, found = ("gpus", service.gpus) if service.gpus is not None else ("tp", service.tp)
                raise AtKey(("services", index, key), found, "nothing: the reference engine runs on CPUs")
        return self

    def _check_names(self) -> None:
        known = None if self.hosts.inline is None else set(self.hosts.inline)
        seen: set[str] = set()
        for index, service in enumerate(self.services):
            if service.name in seen:
                raise AtKey(("services", index, "name"), service.name, "a name of its own")
            seen.add(service.name)
            for place, host in enumerate(service.hosts or []):
                if known is not None and host not in known:
                    raise AtKey(("services", index, "hosts", place), host, ", ".join(sorted(known)))
        if known is not None and self.monitoring.host is not None and self.monitoring.host not in known:
            raise AtKey(("monitoring", "host"), self.monitoring.host, ", ".join(sorted(known)))

    def _check_models(self) -> None:
        if self.engine is EngineKind.REFERENCE and self.model is None and self.drafter is None:
            return
        if self.model is None:
            raise AtKey(("model",), None, "a repo or a path (or leave both out with engine: reference)")
        for service in self.services:
            if service.arm is not Arm.AR and self.drafter is None:
                raise AtKey(("drafter",), None, f"a drafter, since the service {service.name} needs one")

    def _check_ports(self) -> dict[tuple[str | None, int], str]:
        taken: dict[tuple[str | None, int], str] = {}
        for key, port in self._monitoring_ports().items():
            if (None, port) in taken:
                raise AtKey(("monitoring", key), port, f"a port of its own ({taken[None, port]} has it)")
            taken[None, port] = f"monitoring.{key}"
        for index, service in enumerate(self.services):
            for port in service.ports:
                for host in _places(service):
                    other = holder(taken, host, port)
                    if other is not None:
                        raise AtKey(("services", index, "port"), port, f"a free port ({other} has it)")
                    taken[host, port] = f"service {service.name}"
        return taken

    def _monitoring_ports(self) -> dict[str, int]:
        keys = ("prometheus_port", "grafana_port", "node_exporter_port", "gpu_exporter_port")
        return {key: getattr(self.monitoring, key) for key in keys} if self.monitoring.enabled else {}

    def _check_gpus(self) -> None:
        owners: dict[tuple[str | None, int], str] = {}
        wanted: dict[str | None, int] = {}
        for index, service in enumerate(self.services):
            for host in _places(service):
                wanted[host] = wanted.get(host, 0) + service.copies * service.tp
                most = wanted[host] + (wanted.get(None, 0) if host is not None else 0)
                if most > self.gpu.count:
                    key = "gpus" if service.gpus is not None else "replicas"
                    allowed = f"at most {self.gpu.count} GPUs a host (gpu.count) over all services"
                    raise AtKey(("services", index, key), f"{most} GPUs", allowed)
                for gpu in service.gpus or []:
                    other = holder(owners, host, gpu)
                    if other is not None:
                        raise AtKey(("services", index, "gpus"), gpu, f"a free GPU ({other} has it)")
                    if gpu >= self.gpu.count:
                        raise AtKey(("services", index, "gpus"), gpu, f"0 to {self.gpu.count - 1}")
                    owners[host, gpu] = service.name


def _places(service: Service) -> list[str | None]:
    """The service's hosts; null stands for all hosts."""
    return list(service.hosts) if service.hosts else [None]


Ssh.model_rebuild()
