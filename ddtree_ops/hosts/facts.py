"""What is known of a host, parsed from the JSON that `ddtree_probe.py` prints there.

A provider hands out captures: from hosts through Ansible, or from files of hosts captured earlier. What could
not be read is null, never a guess.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddtree_ops.errors import BadInput

XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, (?P<text>.*))?")
VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")


@dataclass(frozen=True)
class GpuFacts:
    """One card as nvidia-smi describes it. Memory in MiB, power in W, clocks in MHz, temperature in C."""

    index: int
    uuid: str
    name: str
    bus: str
    vbios: str | None
    memory: int | None
    used: int | None
    bar1: int | None
    power_cap: float | None
    power_default: float | None
    memory_clock: int | None
    ecc: str | None
    ecc_uncorrected: int
    generation: int | None
    generation_max: int | None
    width: int | None
    width_max: int | None
    temperature: int | None
    utilization: int | None
    persistence: bool | None
    slowdowns: tuple[str, ...]
    processes: tuple[int, ...]


@dataclass(frozen=True)
class Xid:
    """An error that the driver reported since boot."""

    bus: str
    code: int
    text: str


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, in bytes."""

    free: int
    total: int
    fstype: str | None


@dataclass(frozen=True)
class HostFacts:
    """A host as far as it could be read."""

    name: str
    os_id: str | None
    os_version: str | None
    kernel: str
    python: tuple[int, ...]
    root: bool
    ntp: bool | None
    governor: str | None
    hugepages: int | None
    gpus: tuple[GpuFacts, ...]
    pci_gpus: int
    numa: tuple[int, ...]
    smi_error: str | None
    driver: str | None
    driver_loaded: str | None
    driver_installed: str | None
    driver_open: bool | None
    cuda: str | None
    modules: tuple[str, ...]
    held: tuple[str, ...] | None
    persistenced: bool | None
    cmdline: tuple[str, ...]
    acs: Mapping[str, int] | None
    hmm_disabled: bool | None
    xids: tuple[Xid, ...] | None
    toolkit: str | None
    docker: str | None
    docker_error: str | None
    runtimes: tuple[str, ...]
    containers: tuple[str, ...]
    cdi: Mapping[str, tuple[str, ...]]
    container_gpus: int | None
    container_error: str | None
    listening: frozenset[int] | None
    disks: Mapping[str, Disk] = field(default_factory=dict)


class FactsProvider(Protocol):
    """Where captures come from."""

    def captures(self) -> Mapping[str, Mapping[str, Any]]:
        """The probe's answer for each host that could be reached."""
        ...

    def unreachable(self) -> Mapping[str, str]:
        """Why the others could not, or could not be read; known after :meth:`captures`."""
        ...


class CapturedHosts:
    """Hosts from files: one JSON object each, named after the file."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def captures(self) -> Mapping[str, Mapping[str, Any]]:
        return {file.stem: read_capture(file) for file in self._files}

    def unreachable(self) -> Mapping[str, str]:
        return {}


def read_capture(file: Path) -> Mapping[str, Any]:
    """A capture from a file. Raises BadInput when it is none."""
    try:
        capture = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadInput(f"{file}: not JSON ({error})") from error
    if not isinstance(capture, dict) or capture.get("schema") != 1:
        raise BadInput(f"{file}: found no capture of schema 1, allowed: what ddtree_probe.py prints")
    return capture


def parse_facts(capture: Mapping[str, Any], *, name: str) -> HostFacts:
    """Facts of a capture. Raises BadInput when the probe's answer has another shape."""
    try:
        return _parse(capture, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            f"{name}: the probe's answer cannot be read ({type(error).__name__}: {error})"
        ) from error


def _parse(capture: Mapping[str, Any], name: str) -> HostFacts:
    commands, files = capture["commands"], capture["files"]
    smi, smi_error = _smi(commands["nvidia_smi"])
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', files["os_release"] or "", re.MULTILINE))
    loaded = files["driver_version"]
    docker = capture["docker"]
    info = (docker or {}).get("info", {})
    container = capture["container"]
    hugepages = re.search(r"^HugePages_Total:\s+(\d+)", files["meminfo"] or "", re.MULTILINE)
    return HostFacts(
        name=name,
        os_id=release.get("ID"),
        os_version=release.get("VERSION_ID"),
        kernel=capture["kernel"],
        python=tuple(int(part) for part in re.findall(r"\d+", capture["python"])[:3]),
        root=_stdout(commands["uid"]) == "0",
        ntp=_yes(_stdout(commands["ntp"])),
        governor=(files["governor"] or "").strip() or None,
        hugepages=int(hugepages.group(1)) if hugepages else None,
        gpus=tuple(_gpu(index, node) for index, node in enumerate(smi.findall("gpu")))
        if smi is not None
        else (),
        pci_gpus=len(capture["pci_gpus"]),
        numa=tuple(int(gpu["numa_node"] or -1) for gpu in capture["pci_gpus"]),
        smi_error=smi_error,
        driver=smi.findtext("driver_version") if smi is not None else None,
        driver_loaded=_version(loaded),
        driver_installed=_version(_stdout(commands["module_version"])),
        driver_open=_is_open(loaded, _stdout(commands["module_license"])),
        cuda=smi.findtext("cuda_version") if smi is not None else None,
        modules=tuple((files["modules"] or "").split()),
        held=tuple(commands["holds"]["stdout"].split()) if commands["holds"]["rc"] == 0 else None,
        persistenced=_active(commands["persistenced"]),
        cmdline=tuple(capture["cmdline"]),
        acs=None
        if capture["acs"] is None
        else {item["address"]: int(item["control"]) for item in capture["acs"]},
        hmm_disabled=_yes((files["uvm_disable_hmm"] or "").strip()),
        xids=_xids(capture["kernel_log"]),
        toolkit=_version(_stdout(commands["toolkit"])),
        docker=info.get("ServerVersion") or None,
        docker_error=None if docker is None else docker["error"] or None,
        runtimes=tuple(info.get("Runtimes") or ()),
        containers=tuple(docker["containers"]) if docker else (),
        cdi={path: tuple(versions) for path, versions in capture["cdi"].items()},
        container_gpus=container["stdout"].count("UUID: GPU-")
        if container and container["rc"] == 0
        else None,
        container_error=container["stderr"].strip() if container and container["rc"] != 0 else None,
        listening=_ports(commands["listening"]),
        disks={path: Disk(d["free"], d["total"], d["fstype"]) for path, d in capture["disks"].items()},
    )


def _smi(answer: Mapping[str, Any]) -> tuple[ET.Element | None, str | None]:
    """The XML of nvidia-smi, or why there is none."""
    if answer["rc"] != 0:
        lines = (answer["stderr"] or answer["stdout"]).strip().splitlines()
        return None, "no answer (hung)" if answer["timed_out"] else (lines or ["failed"])[-1]
    try:
        return ET.fromstring(answer["stdout"]), None
    except ET.ParseError as error:
        return None, f"answer is no XML ({error})"


def _gpu(index: int, node: ET.Element) -> GpuFacts:
    def text(path: str) -> str | None:
        found = (node.findtext(path) or "").strip()
        return None if found in {"", "N/A", "[N/A]"} or found.startswith("[") else found

    def number(*paths: str) -> float | None:
        for path in paths:
            found = re.match(r"-?\d+(?:\.\d+)?", text(path) or "")
            if found:
                return float(found.group())
        return None

    def whole(*paths: str) -> int | None:
        found = number(*paths)
        return None if found is None else int(found)

    link = "pci/pci_gpu_link_info/"
    reasons = node.find("clocks_event_reasons")
    reasons = node.find("clocks_throttle_reasons") if reasons is None else reasons
    uncorrected = [child for child in node.findall("ecc_errors/volatile/*") if "uncorrectable" in child.tag]
    return GpuFacts(
        index=index,
        uuid=text("uuid") or "",
        name=text("product_name") or "",
        bus=(node.get("id") or "").lower(),
        vbios=text("vbios_version"),
        memory=whole("fb_memory_usage/total"),
        used=whole("fb_memory_usage/used"),
        bar1=whole("bar1_memory_usage/total"),
        power_cap=number("gpu_power_readings/current_power_limit", "power_readings/power_limit"),
        power_default=number("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        memory_clock=whole("max_clocks/mem_clock"),
        ecc=text("ecc_mode/current_ecc"),
        ecc_uncorrected=sum(int(child.text or 0) for child in uncorrected if (child.text or "").isdigit()),
        generation=whole(link + "pcie_gen/current_link_gen"),
        generation_max=whole(link + "pcie_gen/max_host_link_gen", link + "pcie_gen/max_link_gen"),
        width=whole(link + "link_widths/current_link_width"),
        width_max=whole(link + "link_widths/max_link_width"),
        temperature=whole("temperature/gpu_temp"),
        utilization=whole("utilization/gpu_util"),
        persistence={"Enabled": True, "Disabled": False}.get(text("persistence_mode") or ""),
        slowdowns=tuple(
            re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
            for reason in (reasons if reasons is not None else ())
            if reason.text == "Active" and re.search(r"hw_|sw_thermal", reason.tag)
        ),
        processes=tuple(int(pid.text or 0) for pid in node.findall("processes/process_info/pid")),
    )


def _is_open(loaded: str | None, license_text: str) -> bool | None:
    """The loaded module says so itself; for one that is only installed, its licence does."""
    if loaded:
        return "Open Kernel Module" in loaded
    return {"NVIDIA": False, "Dual MIT/GPL": True}.get(license_text)


def _xids(lines: list[str] | None) -> tuple[Xid, ...] | None:
    if lines is None:
        return None
    found = (XID.search(line) for line in lines)
    return tuple(Xid(hit["bus"], int(hit["code"]), hit["text"] or "") for hit in found if hit)


def _ports(answer: Mapping[str, Any]) -> frozenset[int] | None:
    if answer["rc"] != 0:
        return None
    columns = (line.split() for line in answer["stdout"].splitlines())
    return frozenset(int(line[3].rsplit(":", 1)[1]) for line in columns if len(line) > 3)


def _active(answer: Mapping[str, Any]) -> bool | None:
    word = answer["stdout"].strip()
    return None if answer["rc"] is None or not word else word == "active"


def _yes(text: str) -> bool | None:
    return {"yes": True, "Y": True, "1": True, "no": False, "N": False, "0": False}.get(text)


def _stdout(answer: Mapping[str, Any]) -> str:
    return str(answer["stdout"]).strip() if answer["rc"] == 0 else ""


def _version(text: str | None) -> str | None:
    found = VERSION.search(text or "")
    return found.group() if found else None
