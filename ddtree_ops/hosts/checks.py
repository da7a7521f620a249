"""Is a host fit to serve and to be measured? One function a check, with a stable id and a one-line remedy.

A check looks at facts only: nothing here touches a host. `fail` means that services would not start, give
wrong numbers or give numbers that cannot be compared; `warn` means slower or riskier; `skip` says why nothing
can be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ddtree_ops.hosts.facts import GpuFacts, HostFacts
from ddtree_ops.schemas.cluster import Cluster, EngineKind, Service

#: Hardware faults; what else the driver reports comes from programs.
FATAL_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154})
HOT_C = 88
IDLE_MIB = 1024
#: Source validation, translation blocking, request and completion redirect, upstream forwarding.
ACS_BITS = 0x1F
GIB = 2**30
DEPLOYED_FREE = 20 * GIB


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """What one check found on one host."""

    id: str
    host: str
    status: Status
    found: str
    remedy: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "host": self.host,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Expectations:
    """What the checks hold a host against; from cluster.yaml."""

    gpus: bool = True
    gpu_model: str = "RTX PRO 6000 Blackwell"
    gpu_count: int = 8
    power_cap: int | None = None
    branch: int = 580
    cuda: str = "13.0"
    tp: int = 1
    paths: tuple[str, ...] = ("/var/lib/ddtree/models",)
    min_free: int = 250 * GIB
    ports: tuple[int, ...] = ()


Verdict = tuple[Status, str]
Judge = Callable[[HostFacts, Expectations], Verdict]


@dataclass(frozen=True)
class Check:
    """A row of the table: what is checked, what passes, and what to do when it does not."""

    id: str
    wanted: str
    otherwise: str
    remedy: str
    judge: Judge
    gpu: bool


CHECKS: dict[str, Check] = {}


def expectations(cluster: Cluster, host: str) -> Expectations:
    """What a cluster.yaml wants of one of its hosts."""
    services = [service for service in cluster.services if service.hosts is None or host in service.hosts]
    monitoring = cluster.monitoring
    exporters = (monitoring.node_exporter_port, monitoring.gpu_exporter_port) if monitoring.enabled else ()
    return Expectations(
        gpus=cluster.engine is EngineKind.SGLANG,
        gpu_model=cluster.gpu.model,
        gpu_count=cluster.gpu.count,
        power_cap=cluster.gpu.power_cap_w,
        branch=cluster.driver.branch,
        cuda=cluster.image.cuda,
        tp=max((service.tp for service in services), default=1),
        paths=(cluster.paths.models, cluster.paths.state),
        min_free=cluster.paths.min_free_gib * GIB,
        ports=(*_service_ports(services), *exporters),
    )


def check_host(host: HostFacts, want: Expectations) -> list[Finding]:
    """Every check on one host, in the order of the table."""
    return [_find(check, host, want) for check in CHECKS.values()]


def unreachable_host(host: str, reason: str) -> Finding:
    """A host that cannot be reached or read is not a host that is down: nothing follows from it but this."""
    remedy = f"ssh to {host} by hand: address, key, known_hosts, firewall, sudo (ssh.become), python3"
    return Finding("host.reachable", host, Status.FAIL, reason, remedy)


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status; skips do not count."""
    present = {finding.status for finding in findings}
    return next((status for status in (Status.FAIL, Status.WARN) if status in present), Status.PASS)


def _service_ports(services: list[Service]) -> list[int]:
    return [port for service in services for port in service.ports]


def _find(check: Check, host: HostFacts, want: Expectations) -> Finding:
    if check.gpu and not want.gpus:
        return Finding(check.id, host.name, Status.SKIP, "no GPU is wanted")
    status, found = check.judge(host, want)
    remedy = check.remedy if status in {Status.WARN, Status.FAIL} else None
    return Finding(check.id, host.name, status, found, remedy)


def _check(
    id: str, *, wanted: str, otherwise: str, remedy: str, gpu: bool = True
) -> Callable[[Judge], Judge]:
    def register(judge: Judge) -> Judge:
        CHECKS[id] = Check(id, wanted, otherwise, remedy, judge, gpu)
        return judge

    return register


def _judged(good: bool, found: str, otherwise: Status = Status.FAIL) -> Verdict:
    return (Status.PASS if good else otherwise), found


def _skip(why: str) -> Verdict:
    return Status.SKIP, why


# --- the host --------------------------------------------------------------------------------------------


@_check(
    "host.os",
    wanted="Ubuntu 24.04",
    otherwise="warn",
    remedy="other systems may work, but the roles and the driver's packages are tried on Ubuntu 24.04",
    gpu=False,
)
def _os(host: HostFacts, want: Expectations) -> Verdict:
    found = f"{host.os_id or 'unknown'} {host.os_version or ''}".strip()
    return _judged((host.os_id, host.os_version) == ("ubuntu", "24.04"), found, Status.WARN)


@_check(
    "host.root",
    wanted="root, directly or through sudo",
    otherwise="fail",
    remedy="let the user run sudo, or set ssh.become and ssh.become_password",
    gpu=False,
)
def _root(host: HostFacts, want: Expectations) -> Verdict:
    return _judged(host.root, "root" if host.root else "not root")


@_check(
    "host.python",
    wanted="Python 3.8 or newer",
    otherwise="fail",
    remedy="apt-get install python3",
    gpu=False,
)
def _python(host: HostFacts, want: Expectations) -> Verdict:
    return _judged(host.python >= (3, 8), ".".join(map(str, host.python)))


@_check(
    "host.time",
    wanted="clock synchronised",
    otherwise="warn",
    remedy="timedatectl set-ntp true: rows of several hosts are ordered by time",
    gpu=False,
)
def _time(host: HostFacts, want: Expectations) -> Verdict:
    if host.ntp is None:
        return _skip("timedatectl gives no answer")
    return _judged(host.ntp, "synchronised" if host.ntp else "not synchronised", Status.WARN)


@_check(
    "host.governor",
    wanted="CPU governor performance",
    otherwise="warn",
    remedy="set it to performance (role gpu_settings): decoding waits for the CPU between steps",
    gpu=False,
)
def _governor(host: HostFacts, want: Expectations) -> Verdict:
    if host.governor is None:
        return _skip("no frequency scaling")
    return _judged(host.governor == "performance", host.governor, Status.WARN)


@_check(
    "host.hugepages",
    wanted="for information",
    otherwise="pass",
    remedy="nothing to do: nothing here asks for huge pages",
    gpu=False,
)
def _hugepages(host: HostFacts, want: Expectations) -> Verdict:
    return Status.PASS, "unknown" if host.hugepages is None else f"{host.hugepages} reserved"


@_check(
    "host.ports",
    wanted="the services' ports free, or held by containers of ours",
    otherwise="fail",
    remedy="stop what listens there (ss -tlnp), or choose other ports in cluster.yaml",
    gpu=False,
)
def _ports(host: HostFacts, want: Expectations) -> Verdict:
    if host.listening is None:
        return _skip("ss gives no answer")
    taken = sorted(host.listening & set(want.ports))
    if taken and host.containers:
        return Status.PASS, f"{_numbers(taken)} in use, {len(host.containers)} containers of ours"
    return _judged(not taken, f"{_numbers(taken)} in use" if taken else f"{len(want.ports)} free")


@_check(
    "disk.space",
    wanted="paths.min_free_gib free; 20 GiB once services of ours are there",
    otherwise="fail",
    remedy="free space, mount a larger disk, or point paths.models at one",
    gpu=False,
)
def _space(host: HostFacts, want: Expectations) -> Verdict:
    if not host.disks:
        return _skip("no folder was asked about")
    wanted = DEPLOYED_FREE if host.containers else want.min_free
    path, disk = min(host.disks.items(), key=lambda item: item[1].free)
    return _judged(disk.free >= wanted, f"{disk.free // GIB} GiB free for {path}, {wanted // GIB} wanted")


@_check(
    "disk.filesystem",
    wanted="ext4 or xfs for weights",
    otherwise="warn",
    remedy="put paths.models on ext4 or xfs: others load weights slowly",
    gpu=False,
)
def _filesystem(host: HostFacts, want: Expectations) -> Verdict:
    kinds = {disk.fstype or "unknown" for path, disk in host.disks.items() if path == want.paths[0]}
    if not kinds:
        return _skip("the folder of the models was not asked about")
    return _judged(kinds <= {"ext4", "xfs"}, ", ".join(sorted(kinds)), Status.WARN)


# --- the driver ------------------------------------------------------------------------------------------


@_check(
    "driver.answers",
    wanted="nvidia-smi answers",
    otherwise="fail",
    remedy="install the driver (role nvidia_driver), reboot after an update; if it hangs, see dmesg for Xid",
)
def _answers(host: HostFacts, want: Expectations) -> Verdict:
    found = host.smi_error or f"driver {host.driver}"
    return _judged(host.smi_error is None, found)


@_check(
    "driver.branch",
    wanted="the branch of cluster.yaml, 580 or newer",
    otherwise="fail",
    remedy="install the wanted branch (role nvidia_driver) and reboot",
)
def _branch(host: HostFacts, want: Expectations) -> Verdict:
    version = host.driver_loaded or host.driver or host.driver_installed
    if version is None:
        return Status.FAIL, "no driver"
    return _judged(int(version.split(".")[0]) >= want.branch, f"{version}, {want.branch} or newer wanted")


@_check(
    "driver.open",
    wanted="open kernel modules",
    otherwise="fail",
    remedy="replace the proprietary module by the -open packages: Blackwell cards work with no other",
)
def _open(host: HostFacts, want: Expectations) -> Verdict:
    if host.driver_open is None:
        return Status.FAIL, "no module"
    return _judged(host.driver_open, "open" if host.driver_open else "proprietary")


@_check(
    "driver.nouveau",
    wanted="nouveau not loaded",
    otherwise="fail",
    remedy="blacklist nouveau (role nvidia_driver), update the initramfs, reboot",
)
def _nouveau(host: HostFacts, want: Expectations) -> Verdict:
    loaded = "nouveau" in host.modules
    return _judged(not loaded, "loaded" if loaded else "not loaded")


@_check(
    "driver.versions",
    wanted="the loaded module is the installed one",
    otherwise="fail",
    remedy="reboot: the driver was updated under the loaded module",
)
def _versions(host: HostFacts, want: Expectations) -> Verdict:
    if host.driver_loaded is None or host.driver_installed is None:
        return _skip("loaded or installed version unknown")
    same = host.driver_loaded == host.driver_installed
    return _judged(same, f"loaded {host.driver_loaded}, installed {host.driver_installed}")


@_check(
    "driver.held",
    wanted="the driver's packages held, so that no unattended upgrade changes them",
    otherwise="warn",
    remedy="apt-mark hold the driver's packages (role nvidia_driver)",
)
def _held(host: HostFacts, want: Expectations) -> Verdict:
    if host.held is None:
        return _skip("apt-mark gives no answer")
    held = [name for name in host.held if name.startswith(("nvidia-", "libnvidia-", "linux-modules-nvidia-"))]
    return _judged(bool(held), f"{len(held)} packages held", Status.WARN)


@_check(
    "driver.cuda",
    wanted="the image's CUDA version is at most the driver's",
    otherwise="fail",
    remedy="update the driver, or choose an image with an older CUDA: error 804 is what comes otherwise",
)
def _cuda(host: HostFacts, want: Expectations) -> Verdict:
    if host.cuda is None:
        return _skip("the driver's CUDA version is unknown")
    good = _dotted(want.cuda) <= _dotted(host.cuda)
    return _judged(good, f"image {want.cuda}, driver up to {host.cuda}")


# --- containers ------------------------------------------------------------------------------------------


@_check(
    "docker.answers",
    wanted="a Docker engine that answers",
    otherwise="fail",
    remedy="install and start docker (role container_runtime)",
    gpu=False,
)
def _docker(host: HostFacts, want: Expectations) -> Verdict:
    if host.docker:
        return Status.PASS, host.docker
    return Status.FAIL, host.docker_error or "not installed"


@_check(
    "docker.toolkit",
    wanted="NVIDIA's container toolkit installed",
    otherwise="fail",
    remedy="install nvidia-container-toolkit (role container_runtime)",
)
def _toolkit(host: HostFacts, want: Expectations) -> Verdict:
    return _judged(host.toolkit is not None, host.toolkit or "not installed")


@_check(
    "docker.runtime",
    wanted="the runtime nvidia known to docker, or a CDI specification",
    otherwise="fail",
    remedy="nvidia-ctk runtime configure --runtime=docker, then restart docker (role container_runtime)",
)
def _runtime(host: HostFacts, want: Expectations) -> Verdict:
    if not host.docker:
        return _skip("docker gives no answer")
    found = [*(["runtime nvidia"] if "nvidia" in host.runtimes else []), *host.cdi]
    return _judged(bool(found), ", ".join(found) or "neither")


@_check(
    "docker.cdi",
    wanted="CDI specifications made for the loaded driver",
    otherwise="fail",
    remedy="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (role container_runtime)",
)
def _cdi(host: HostFacts, want: Expectations) -> Verdict:
    if not host.cdi or host.driver_loaded is None:
        return _skip("no CDI specification" if not host.cdi else "no driver")
    stale = {path: versions for path, versions in host.cdi.items() if set(versions) - {host.driver_loaded}}
    found = "; ".join(f"{path}: {', '.join(versions)}" for path, versions in stale.items())
    return _judged(not stale, f"{found}, loaded {host.driver_loaded}" if stale else host.driver_loaded)


@_check(
    "docker.gpus",
    wanted="a container sees every GPU",
    otherwise="fail",
    remedy="restart docker after installing the toolkit; a daemon-reload can take GPUs away from containers",
)
def _container(host: HostFacts, want: Expectations) -> Verdict:
    if host.container_error is not None:
        return Status.FAIL, host.container_error[-200:]
    if host.container_gpus is None:
        return _skip("the image is not on the host yet")
    return _judged(host.container_gpus == len(host.gpus), f"{host.container_gpus} of {len(host.gpus)}")


# --- the cards -------------------------------------------------------------------------------------------


@_check(
    "gpu.count",
    wanted="as many cards as gpu.count",
    otherwise="fail",
    remedy="reseat or power-cycle: a card on the bus without a driver has fallen off; else correct gpu.count",
)
def _count(host: HostFacts, want: Expectations) -> Verdict:
    found = f"{len(host.gpus)} of {want.gpu_count}, {host.pci_gpus} on the PCI bus"
    return _judged(len(host.gpus) == want.gpu_count, found)


def _cards(judge: Callable[[tuple[GpuFacts, ...], HostFacts, Expectations], Verdict]) -> Judge:
    """A check that needs nvidia-smi's answer."""

    def judged(host: HostFacts, want: Expectations) -> Verdict:
        return judge(host.gpus, host, want) if host.gpus else _skip("nvidia-smi shows no card")

    return judged


@_check(
    "gpu.model",
    wanted="the model of cluster.yaml",
    otherwise="fail",
    remedy="correct gpu.model: kernels are tuned and results are labelled by model",
)
@_cards
def _model(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    names = sorted({gpu.name for gpu in gpus})
    return _judged(all(want.gpu_model.lower() in name.lower() for name in names), ", ".join(names))


@_check(
    "gpu.same",
    wanted="one SKU: same name and memory",
    otherwise="fail",
    remedy="compare arms on cards of one SKU only: list them under gpus of the services",
)
@_cards
def _same(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    return _equal({gpu.index: f"{gpu.name} {gpu.memory} MiB" for gpu in gpus})


@_check(
    "gpu.memory_clock",
    wanted="the same highest memory clock",
    otherwise="fail",
    remedy="compare arms on cards with one memory clock only: it is fixed by SKU and sets the decode speed",
)
@_cards
def _memory_clock(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    return _equal({gpu.index: f"{gpu.memory_clock} MHz" for gpu in gpus})


@_check(
    "gpu.power_cap",
    wanted="the same power cap, and that of cluster.yaml if it names one",
    otherwise="fail",
    remedy="set gpu.power_cap_w (role gpu_settings); a driver change resets caps",
)
@_cards
def _power_cap(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    status, found = _equal({gpu.index: f"{gpu.power_cap:g} W" for gpu in gpus if gpu.power_cap is not None})
    wrong = want.power_cap is not None and any(gpu.power_cap != want.power_cap for gpu in gpus)
    return (Status.FAIL, f"{found}, {want.power_cap} W wanted") if wrong else (status, found)


@_check(
    "gpu.ecc",
    wanted="the same ECC mode, no uncorrected errors since boot",
    otherwise="warn; fail with uncorrected errors",
    remedy="set one ECC mode on all cards (nvidia-smi -e) and reboot; replace a card with uncorrected errors",
)
@_cards
def _ecc(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    broken = [gpu.index for gpu in gpus if gpu.ecc_uncorrected]
    if broken:
        return Status.FAIL, f"uncorrected errors on GPU {_numbers(broken)}"
    return _equal({gpu.index: gpu.ecc or "not supported" for gpu in gpus}, Status.WARN)


@_check(
    "gpu.persistence",
    wanted="persistence on",
    otherwise="warn",
    remedy="enable nvidia-persistenced (role gpu_settings): otherwise cards start cold and forget settings",
)
@_cards
def _persistence(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    off = [gpu.index for gpu in gpus if gpu.persistence is False]
    return _judged(not off, f"off on GPU {_numbers(off)}" if off else "on", Status.WARN)


@_check(
    "gpu.temperature",
    wanted=f"below {HOT_C} C",
    otherwise="fail",
    remedy="stop load, look at fans and airflow, or lower gpu.power_cap_w",
)
@_cards
def _temperature(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    hottest = max(gpus, key=lambda gpu: gpu.temperature or 0)
    found = f"up to {hottest.temperature} C (GPU {hottest.index})"
    return _judged((hottest.temperature or 0) < HOT_C, found)


@_check(
    "gpu.throttle",
    wanted="no slowdown by heat or power brake",
    otherwise="fail",
    remedy="look at cooling and power supply: numbers of a throttled card are invalid",
)
@_cards
def _throttle(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    slow = [f"GPU {gpu.index}: {', '.join(gpu.slowdowns)}" for gpu in gpus if gpu.slowdowns]
    return _judged(not slow, "; ".join(slow) or "none")


@_check(
    "gpu.pcie",
    wanted="16 lanes; generation 5 under load (an idle card shows less and is not judged)",
    otherwise="warn",
    remedy="move the card to an x16 Gen5 slot, or keep it out of comparisons",
)
@_cards
def _pcie(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    narrow = [f"GPU {gpu.index}: x{gpu.width}" for gpu in gpus if gpu.width is not None and gpu.width < 16]
    busy = [gpu for gpu in gpus if (gpu.utilization or 0) >= 50]
    slow = [f"GPU {gpu.index}: Gen{gpu.generation} under load" for gpu in busy if (gpu.generation or 5) < 5]
    capped = [
        f"GPU {gpu.index}: at most Gen{gpu.generation_max}" for gpu in gpus if (gpu.generation_max or 5) < 5
    ]
    wrong = [*narrow, *slow, *capped]
    found = f"x16, {len(busy)} under load" if busy else "x16, all idle"
    return _judged(not wrong, "; ".join(wrong) or found, Status.WARN)


@_check(
    "gpu.bar1",
    wanted="BAR1 as large as the card's memory",
    otherwise="warn; fail with TP > 1",
    remedy="switch on Above 4G decoding and Resizable BAR in the BIOS: GPUs reach each other through BAR1",
)
@_cards
def _bar1(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    small = [
        f"GPU {gpu.index}: {gpu.bar1} MiB"
        for gpu in gpus
        if gpu.bar1 and gpu.memory and gpu.bar1 < gpu.memory
    ]
    found = "; ".join(small) or f"{gpus[0].bar1} MiB"
    return _judged(not small, found, _by_tp(want))


@_check(
    "gpu.idle",
    wanted="no memory held by others",
    otherwise="warn",
    remedy="find the owner (nvidia-smi, ps) and stop it; never kill by name",
)
@_cards
def _idle(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    used = [gpu for gpu in gpus if (gpu.used or 0) >= IDLE_MIB]
    if used and host.containers:
        return Status.PASS, f"{len(used)} in use, {len(host.containers)} containers of ours"
    found = [
        f"GPU {gpu.index}: {gpu.used} MiB, processes {_numbers(gpu.processes) or 'unknown'}" for gpu in used
    ]
    return _judged(not used, "; ".join(found) or "idle", Status.WARN)


@_check(
    "gpu.numa",
    wanted="for information",
    otherwise="pass",
    remedy="nothing to do: services are pinned to the node of their card",
)
def _numa(host: HostFacts, want: Expectations) -> Verdict:
    return Status.PASS, f"nodes {_numbers(host.numa)}" if host.numa else "no card"


# --- the kernel ------------------------------------------------------------------------------------------


@_check(
    "kernel.iommu",
    wanted="iommu=pt, or the IOMMU off",
    otherwise="warn",
    remedy="add iommu=pt to the kernel's command line (role gpu_settings) and reboot",
)
def _iommu(host: HostFacts, want: Expectations) -> Verdict:
    good = {"iommu=pt", "iommu=off", "amd_iommu=off", "intel_iommu=off"} & set(host.cmdline)
    return _judged(bool(good), ", ".join(sorted(good)) or "neither iommu=pt nor off", Status.WARN)


@_check(
    "kernel.aspm",
    wanted="pcie_aspm=off",
    otherwise="warn",
    remedy="add pcie_aspm=off to the kernel's command line (role gpu_settings) and reboot",
)
def _aspm(host: HostFacts, want: Expectations) -> Verdict:
    good = "pcie_aspm=off" in host.cmdline
    return _judged(good, "off" if good else "not off", Status.WARN)


@_check(
    "kernel.acs",
    wanted="ACS off on root ports and switches",
    otherwise="warn; fail with TP > 1",
    remedy="switch ACS off in the BIOS or at boot (role gpu_settings): it sends peer traffic over the CPU",
)
def _acs(host: HostFacts, want: Expectations) -> Verdict:
    if host.acs is None:
        return _skip("configuration space can be read by root only")
    on = [address for address, control in host.acs.items() if control & ACS_BITS]
    found = f"on for {len(on)} of {len(host.acs)} bridges"
    return _judged(not on, found + (f" ({', '.join(on[:3])}...)" if on else ""), _by_tp(want))


@_check(
    "kernel.hmm",
    wanted="with TP > 1: uvm_disable_hmm=1",
    otherwise="warn with TP > 1",
    remedy="options nvidia_uvm uvm_disable_hmm=1 in modprobe.d (role nvidia_driver), then reboot",
)
def _hmm(host: HostFacts, want: Expectations) -> Verdict:
    if want.tp == 1 or host.hmm_disabled is None:
        return _skip("matters with TP > 1 only" if want.tp == 1 else "nvidia_uvm is not loaded")
    return _judged(host.hmm_disabled, "disabled" if host.hmm_disabled else "enabled", Status.WARN)


@_check(
    "kernel.xid",
    wanted="no hardware Xid since boot",
    otherwise=f"fail for {', '.join(map(str, sorted(FATAL_XIDS)))}; warn for others",
    remedy="runbook gpu-xid: numbers since then are invalid; reboot, and power-cycle if the card stays away",
)
def _xid(host: HostFacts, want: Expectations) -> Verdict:
    if host.xids is None:
        return _skip("the kernel's log cannot be read")
    found = ", ".join(f"{xid.code} on {xid.bus}" for xid in host.xids[:4]) or "none"
    if any(xid.code in FATAL_XIDS for xid in host.xids):
        return Status.FAIL, found
    return _judged(not host.xids, found, Status.WARN)


def _by_tp(want: Expectations) -> Status:
    return Status.FAIL if want.tp > 1 else Status.WARN


def _equal(values: Mapping[int, str], otherwise: Status = Status.FAIL) -> Verdict:
    """Whether all GPUs show one value; else who shows what."""
    kinds: dict[str, list[int]] = {}
    for index, value in values.items():
        kinds.setdefault(value, []).append(index)
    if len(kinds) == 1:
        return Status.PASS, next(iter(kinds))
    return otherwise, "; ".join(f"{kind}: GPU {_numbers(gpus)}" for kind, gpus in kinds.items()) or "unknown"


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _dotted(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
