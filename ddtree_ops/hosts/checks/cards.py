"""The cards: alike, free, cool, and on a full slot."""

from __future__ import annotations

from ddtree_ops.hosts.checks.expectations import Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.checks.table import Check, Verdict, by_tp, equal, into, judged, numbers, of_cards
from ddtree_ops.hosts.facts import GpuFacts, HostFacts

HOT_C = 88
IDLE_MIB = 1024
CHECKS: dict[str, Check] = {}
check = into(CHECKS)


@check(
    "gpu.count",
    wanted="as many cards as gpu.count",
    otherwise="fail",
    remedy="reseat or power-cycle: a card on the bus without a driver has fallen off; else correct gpu.count",
)
def _count(host: HostFacts, want: Expectations) -> Verdict:
    found = f"{len(host.gpus)} of {want.gpu_count}, {host.pci_gpus} on the PCI bus"
    return judged(len(host.gpus) == want.gpu_count, found)


@check(
    "gpu.model",
    wanted="the model of cluster.yaml",
    otherwise="fail",
    remedy="correct gpu.model: kernels are tuned and results are labelled by model",
)
@of_cards
def _model(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    names = sorted({gpu.name for gpu in gpus})
    return judged(all(want.gpu_model.lower() in name.lower() for name in names), ", ".join(names))


@check(
    "gpu.same",
    wanted="one SKU: same name and memory",
    otherwise="fail",
    remedy="compare arms on cards of one SKU only: list them under gpus of the services",
)
@of_cards
def _same(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    return equal({gpu.index: f"{gpu.name} {gpu.memory} MiB" for gpu in gpus})


@check(
    "gpu.memory_clock",
    wanted="the same highest memory clock",
    otherwise="fail",
    remedy="compare arms on cards with one memory clock only: it is fixed by SKU and sets the decode speed",
)
@of_cards
def _memory_clock(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    return equal({gpu.index: f"{gpu.memory_clock} MHz" for gpu in gpus})


@check(
    "gpu.power_cap",
    wanted="the same power cap, and that of cluster.yaml if it names one",
    otherwise="fail",
    remedy="set gpu.power_cap_w (role gpu_settings); a driver change resets caps",
)
@of_cards
def _power_cap(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    status, found = equal({gpu.index: f"{gpu.power_cap:g} W" for gpu in gpus if gpu.power_cap is not None})
    wrong = want.power_cap is not None and any(gpu.power_cap != want.power_cap for gpu in gpus)
    return (Status.FAIL, f"{found}, {want.power_cap} W wanted") if wrong else (status, found)


@check(
    "gpu.ecc",
    wanted="the same ECC mode, no uncorrected errors since boot",
    otherwise="warn; fail with uncorrected errors",
    remedy="set one ECC mode on all cards (nvidia-smi -e) and reboot; replace a card with uncorrected errors",
)
@of_cards
def _ecc(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    broken = [gpu.index for gpu in gpus if gpu.ecc_uncorrected]
    if broken:
        return Status.FAIL, f"uncorrected errors on GPU {numbers(broken)}"
    return equal({gpu.index: gpu.ecc or "not supported" for gpu in gpus}, Status.WARN)


@check(
    "gpu.persistence",
    wanted="persistence on",
    otherwise="warn",
    remedy="enable nvidia-persistenced (role gpu_settings): otherwise cards start cold and forget settings",
)
@of_cards
def _persistence(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    off = [gpu.index for gpu in gpus if gpu.persistence is False]
    return judged(not off, f"off on GPU {numbers(off)}" if off else "on", Status.WARN)


@check(
    "gpu.temperature",
    wanted=f"below {HOT_C} C",
    otherwise="fail",
    remedy="stop load, look at fans and airflow, or lower gpu.power_cap_w",
)
@of_cards
def _temperature(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    hottest = max(gpus, key=lambda gpu: gpu.temperature or 0)
    found = f"up to {hottest.temperature} C (GPU {hottest.index})"
    return judged((hottest.temperature or 0) < HOT_C, found)


@check(
    "gpu.throttle",
    wanted="no slowdown by heat or power brake",
    otherwise="fail",
    remedy="look at cooling and power supply: numbers of a throttled card are invalid",
)
@of_cards
def _throttle(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    slow = [f"GPU {gpu.index}: {', '.join(gpu.slowdowns)}" for gpu in gpus if gpu.slowdowns]
    return judged(not slow, "; ".join(slow) or "none")


@check(
    "gpu.pcie",
    wanted="16 lanes; generation 5 under load (an idle card shows less and is not judged)",
    otherwise="warn",
    remedy="move the card to an x16 Gen5 slot, or keep it out of comparisons",
)
@of_cards
def _pcie(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    narrow = [f"GPU {gpu.index}: x{gpu.width}" for gpu in gpus if gpu.width is not None and gpu.width < 16]
    busy = [gpu for gpu in gpus if (gpu.utilization or 0) >= 50]
    slow = [f"GPU {gpu.index}: Gen{gpu.generation} under load" for gpu in busy if (gpu.generation or 5) < 5]
    capped = [
        f"GPU {gpu.index}: at most Gen{gpu.generation_max}" for gpu in gpus if (gpu.generation_max or 5) < 5
    ]
    wrong = [*narrow, *slow, *capped]
    found = f"x16, {len(busy)} under load" if busy else "x16, all idle"
    return judged(not wrong, "; ".join(wrong) or found, Status.WARN)


@check(
    "gpu.bar1",
    wanted="BAR1 as large as the card's memory",
    otherwise="warn; fail with TP > 1",
    remedy="switch on Above 4G decoding and Resizable BAR in the BIOS: GPUs reach each other through BAR1",
)
@of_cards
def _bar1(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    small = [
        f"GPU {gpu.index}: {gpu.bar1} MiB"
        for gpu in gpus
        if gpu.bar1 and gpu.memory and gpu.bar1 < gpu.memory
    ]
    found = "; ".join(small) or f"{gpus[0].bar1} MiB"
    return judged(not small, found, by_tp(want))


@check(
    "gpu.idle",
    wanted="no memory held by others",
    otherwise="warn",
    remedy="find the owner (nvidia-smi, ps) and stop it; never kill by name",
)
@of_cards
def _idle(gpus: tuple[GpuFacts, ...], host: HostFacts, want: Expectations) -> Verdict:
    used = [gpu for gpu in gpus if (gpu.used or 0) >= IDLE_MIB]
    if used and host.containers:
        return Status.PASS, f"{len(used)} in use, {len(host.containers)} containers of ours"
    found = [
        f"GPU {gpu.index}: {gpu.used} MiB, processes {numbers(gpu.processes) or 'unknown'}" for gpu in used
    ]
    return judged(not used, "; ".join(found) or "idle", Status.WARN)


@check(
    "gpu.numa",
    wanted="for information",
    otherwise="pass",
    remedy="nothing to do: services are pinned to the node of their card",
)
def _numa(host: HostFacts, want: Expectations) -> Verdict:
    return Status.PASS, f"nodes {numbers(host.numa)}" if host.numa else "no card"
