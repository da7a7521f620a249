"""A deployed cluster: its replicas as subjects, its hosts as facts, the kernel table on one of its cards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.deploy.layout import Replica
from ddtree_ops.deploy.render import ENTRYPOINT
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.errors import BadEnvironment, DdtreeError
from ddtree_ops.hosts.facts import GpuFacts, HostFacts
from ddtree_ops.schemas import acceptance
from ddtree_ops.schemas.acceptance import KernelTable, StageStatus
from ddtree_ops.schemas.cluster import EngineKind
from ddtree_ops.verify.job import Place
from ddtree_ops.verify.kernels import BUDGET_S, IDLE_MIB, LIMIT_S, MODULE, read_table
from ddtree_ops.verify.subjects import Address

#: What of a host's facts explains a number or a failure, and says nothing of who owns it.
FACTS = (
    "os_id", "os_version", "kernel", "governor", "hugepages", "pci_gpus", "driver", "driver_loaded",
    "driver_open", "cuda", "toolkit", "docker", "hmm_disabled", "persistenced", "smi_error",
)  # fmt: skip
GPU_FACTS = (
    "uuid", "name", "vbios", "memory", "bar1", "power_cap", "power_default", "memory_clock", "ecc",
    "ecc_uncorrected", "generation", "generation_max", "width", "width_max", "temperature", "persistence",
    "slowdowns",
)  # fmt: skip
SERVICE = "kernels"
MARK = "ddtree-kernel-table:"
#: The table comes back as a line of the container's output: no folder of the host is touched.
SCRIPT = f"""
python3 -m {MODULE} --out /tmp/kernels --budget-s {BUDGET_S}; code=$?
python3 -c 'import json; print("{MARK}" + json.dumps(json.load(open("/tmp/kernels/summary.json"))))'
exit $code
"""


@dataclass(frozen=True)
class Deployed:
    """A running replica and its container's image."""

    replica: Replica
    image: str


def deployed(session: ClusterSession) -> list[Deployed]:
    """Every replica of the session's hosts, as they run.

    Raises BadEnvironment for a host that does not answer and for a replica that does not run: what is not
    there cannot be accepted.
    """
    found, troubles = [], []
    for host in session.inventory.names:
        if host in session.unreachable:
            troubles.append(f"{host} does not answer: {session.unreachable[host]}")
            continue
        for service in session.cluster.services:
            if service.hosts is not None and host not in service.hosts:
                continue
            for index, port in enumerate(service.ports):
                replica = Replica(service, host, index, port)
                container = session.engine(host).find(replica.container(session.cluster.name))
                if container is None or not container.running:
                    state = container.outcome if container else "there is no container"
                    troubles.append(f"{replica.name}: {state}")
                else:
                    found.append(Deployed(replica, container.image))
    if troubles:
        raise BadEnvironment(
            f"not everything runs: {'; '.join(troubles)}",
            remedy="`ddtree deploy up` starts it; --limit leaves hosts out",
        )
    return found


def addresses_of(session: ClusterSession, replicas: Sequence[Deployed]) -> list[Address]:
    """The replicas on this machine's side of the ssh links."""
    labels = host_labels(session)
    return [
        Address(
            one.replica.service.arm,
            session.url(one.replica),
            host=labels[one.replica.host],
            headers=session.headers,
        )
        for one in replicas
    ]


def host_labels(session: ClusterSession) -> dict[str, str]:
    """host-1 and so on, in the order of the whole inventory, so that --limit changes no label."""
    return {name: f"host-{number}" for number, name in enumerate(session.whole.names, 1)}


def place_of(session: ClusterSession, facts: Mapping[str, HostFacts]) -> Place:
    """Hosts as a bundle may show them, and what has to be taken out of its strings."""
    labels = host_labels(session)
    names = dict(labels)
    for host in session.whole.hosts:
        names.setdefault(host.address, labels[host.name])
    cards = {labels[name]: sorted(gpu.uuid for gpu in one.gpus) for name, one in facts.items()}
    text = json.dumps([sorted(session.inventory.names), cards], sort_keys=True)
    return Place(
        hosts=[shown_facts(labels[name], one) for name, one in facts.items()],
        names=names,
        secrets=list(session.secrets.values()),
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def shown_facts(label: str, facts: HostFacts) -> acceptance.HostFacts:
    """The allow-listed part of a host's facts. UUIDs are hashed with everything else."""
    shown: dict[str, Any] = {name: getattr(facts, name) for name in FACTS}
    shown["numa_nodes"] = len(set(facts.numa))
    shown["xids"] = None if facts.xids is None else sorted(xid.code for xid in facts.xids)
    gpus = [{name: _plain(getattr(gpu, name)) for name in GPU_FACTS} for gpu in facts.gpus]
    return acceptance.HostFacts(name=label, facts=shown, gpus=gpus)


class ClusterKernels:
    """The benchmark in a one-off container of the engine's image, on one idle card of the cluster."""

    def __init__(
        self, session: ClusterSession, facts: Mapping[str, HostFacts], replicas: Sequence[Deployed]
    ) -> None:
        self._session = session
        self._facts = facts
        self._images = {one.replica.host: one.image for one in replicas}

    def run(self, folder: Path) -> KernelTable:
        if self._session.cluster.engine is EngineKind.REFERENCE:
            return KernelTable(status=StageStatus.SKIPPED, reason="the CPU engine's image has no CUDA")
        host, card, reason = idle_card_of({name: self._facts.get(name) for name in self._images})
        if host is None or card is None:
            return KernelTable(status=StageStatus.SKIPPED, reason=reason)
        spec = kernels_spec(self._session.cluster.name, self._images[host], card)
        try:
            done = self._session.engine(host).run_once(spec, timeout_s=LIMIT_S)
        except DdtreeError as error:
            return KernelTable(status=StageStatus.FAILED, reason=error.message)
        return table_of(done.exit_code, done.output)


def kernels_spec(cluster: str, image: str, card: str) -> ContainerSpec:
    """The container of the benchmark: one card, no secret, nothing of the host mounted."""
    return ContainerSpec(
        name=f"{cluster}-{SERVICE}-0",
        cluster=cluster,
        service=SERVICE,
        replica=0,
        image=image,
        entrypoint=ENTRYPOINT,
        argv=("sh", "-c", SCRIPT),
        gpus=(card,),
    )


def table_of(exit_code: int, output: str) -> KernelTable:
    """From a container's output, in which the table is one line."""
    lines = output.splitlines()
    summary = next((line.removeprefix(MARK) for line in reversed(lines) if line.startswith(MARK)), "")
    rest = "\n".join(line for line in lines if not line.startswith(MARK))
    return read_table(summary, exit_code, rest)


def idle_card_of(facts: Mapping[str, HostFacts | None]) -> tuple[str | None, str | None, str | None]:
    """(host, UUID, null) of the first idle card, or (null, null, why there is none)."""
    cards = 0
    for host, one in facts.items():
        for gpu in one.gpus if one is not None else ():
            cards += 1
            if _idle(gpu):
                return host, gpu.uuid, None
    if not cards:
        return None, None, "no CUDA card is known on the hosts"
    return (
        None,
        None,
        f"no idle card: all {cards} are in use; leave one free, or stop a service for the table",
    )


def _idle(gpu: GpuFacts) -> bool:
    return not gpu.processes and gpu.used is not None and gpu.used <= IDLE_MIB


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
