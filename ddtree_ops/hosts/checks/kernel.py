"""What the kernel's command line, modules and log say of the cards."""

from __future__ import annotations

from ddtree_ops.hosts.checks.expectations import Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.checks.table import Check, Verdict, by_tp, into, judged, skip
from ddtree_ops.hosts.facts import HostFacts

#: Hardware faults; what else the driver reports comes from programs.
FATAL_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154})
#: Source validation, translation blocking, request and completion redirect, upstream forwarding.
ACS_BITS = 0x1F
CHECKS: dict[str, Check] = {}
check = into(CHECKS)


@check(
    "kernel.iommu",
    wanted="iommu=pt, or the IOMMU off",
    otherwise="warn",
    remedy="add iommu=pt to the kernel's command line (role gpu_settings) and reboot",
)
def _iommu(host: HostFacts, want: Expectations) -> Verdict:
    good = {"iommu=pt", "iommu=off", "amd_iommu=off", "intel_iommu=off"} & set(host.cmdline)
    return judged(bool(good), ", ".join(sorted(good)) or "neither iommu=pt nor off", Status.WARN)


@check(
    "kernel.aspm",
    wanted="pcie_aspm=off",
    otherwise="warn",
    remedy="add pcie_aspm=off to the kernel's command line (role gpu_settings) and reboot",
)
def _aspm(host: HostFacts, want: Expectations) -> Verdict:
    good = "pcie_aspm=off" in host.cmdline
    return judged(good, "off" if good else "not off", Status.WARN)


@check(
    "kernel.acs",
    wanted="ACS off on root ports and switches",
    otherwise="warn; fail with TP > 1",
    remedy="switch ACS off in the BIOS or at boot (role gpu_settings): it sends peer traffic over the CPU",
)
def _acs(host: HostFacts, want: Expectations) -> Verdict:
    if host.acs is None:
        return skip("configuration space can be read by root only")
    on = [address for address, control in host.acs.items() if control & ACS_BITS]
    found = f"on for {len(on)} of {len(host.acs)} bridges"
    return judged(not on, found + (f" ({', '.join(on[:3])}...)" if on else ""), by_tp(want))


@check(
    "kernel.hmm",
    wanted="with TP > 1: uvm_disable_hmm=1",
    otherwise="warn with TP > 1",
    remedy="options nvidia_uvm uvm_disable_hmm=1 in modprobe.d (role nvidia_driver), then reboot",
)
def _hmm(host: HostFacts, want: Expectations) -> Verdict:
    if want.tp == 1 or host.hmm_disabled is None:
        return skip("matters with TP > 1 only" if want.tp == 1 else "nvidia_uvm is not loaded")
    return judged(host.hmm_disabled, "disabled" if host.hmm_disabled else "enabled", Status.WARN)


@check(
    "kernel.xid",
    wanted="no hardware Xid since boot",
    otherwise=f"fail for {', '.join(map(str, sorted(FATAL_XIDS)))}; warn for others",
    remedy="runbook gpu-xid: numbers since then are invalid; reboot, and power-cycle if the card stays away",
)
def _xid(host: HostFacts, want: Expectations) -> Verdict:
    if host.xids is None:
        return skip("the kernel's log cannot be read")
    found = ", ".join(f"{xid.code} on {xid.bus}" for xid in host.xids[:4]) or "none"
    if any(xid.code in FATAL_XIDS for xid in host.xids):
        return Status.FAIL, found
    return judged(not host.xids, found, Status.WARN)
