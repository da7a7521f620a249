"""Print what a GPU host looks like, as one JSON object. Changes nothing.

    python3 ddtree_probe.py [--path DIR]... [--image IMAGE] [--timeout SECONDS]

Standard library only, Python 3.8 or newer: it runs on the host. Each command has a time limit of its own,
since nvidia-smi hangs when a card has fallen off the bus. Only what the checks need is kept: proxies,
registries and unknown kernel arguments could carry secrets. ACS is read from PCI configuration space, which
only root can.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCHEMA = 1
MAX_OUTPUT = 2000000

COMMANDS = {
    "nvidia_smi": ["nvidia-smi", "-q", "-x"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "module_license": ["modinfo", "-F", "license", "nvidia"],
    "module_version": ["modinfo", "-F", "version", "nvidia"],
    "toolkit": ["nvidia-ctk", "--version"],
    "holds": ["apt-mark", "showhold"],
    "persistenced": ["systemctl", "is-active", "nvidia-persistenced"],
    "ntp": ["timedatectl", "show", "-p", "NTPSynchronized", "--value"],
    "listening": ["ss", "-Htln"],
    "uid": ["id", "-u"],
}
FILES = {
    "os_release": "/etc/os-release",
    "driver_version": "/proc/driver/nvidia/version",
    "modules": "/proc/modules",
    "meminfo": "/proc/meminfo",
    "uvm_disable_hmm": "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
}
CDI_SPECS = (
    "/etc/cdi/nvidia.yaml",
    "/etc/cdi/nvidia.json",
    "/var/run/cdi/nvidia.yaml",
    "/var/run/cdi/nvidia.json",
)
CMDLINE_WORDS = re.compile(r"^(\w*iommu|pcie?_?\w*=|nouveau\.|nvidia|modprobe\.blacklist|rd\.driver)")
MODULES = re.compile(r"^(nvidia\w*|nouveau) ", re.MULTILINE)
DOCKER_FIELDS = (
    "ServerVersion",
    "DefaultRuntime",
    "CgroupDriver",
    "CgroupVersion",
    "Driver",
    "DockerRootDir",
    "LiveRestoreEnabled",
    "CDISpecDirs",
)
EXT_CAP_ACS = 0x000D


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what a GPU host looks like, as JSON.")
    parser.add_argument("--path", action="append", default=[], help="a folder whose free space matters")
    parser.add_argument("--image", default="", help="an image of the host to count GPUs in")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for each command")
    arguments = parser.parse_args()
    json.dump(probe(arguments), sys.stdout)
    sys.stdout.write("\n")


def probe(arguments: argparse.Namespace) -> dict[str, Any]:
    commands = {name: run(argv, arguments.timeout) for name, argv in COMMANDS.items()}
    return {
        "schema": SCHEMA,
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "time": time.time(),
        "commands": commands,
        "files": {name: trim(name, read(path)) for name, path in FILES.items()},
        "cmdline": [word for word in (read("/proc/cmdline") or "").split() if CMDLINE_WORDS.match(word)],
        "kernel_log": kernel_log(arguments.timeout),
        "pci_gpus": pci_gpus(),
        "acs": acs_bridges(),
        "docker": docker(arguments.timeout),
        "cdi": cdi(),
        "disks": {path: disk(path) for path in arguments.path},
        "container": container_gpus(arguments.image, arguments.timeout) if arguments.image else None,
    }


def run(argv: list[str], timeout: float) -> dict[str, Any]:
    """rc is null when the program is missing, and `timed_out` is set when it hung."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            env=dict(os.environ, LC_ALL="C"),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"rc": None, "stdout": "", "stderr": f"no answer in {timeout:g} s", "timed_out": True}
    except OSError as error:
        return {"rc": None, "stdout": "", "stderr": error.strerror or "cannot be run", "timed_out": False}
    return {
        "rc": done.returncode,
        "stdout": done.stdout.decode("utf-8", "replace")[:MAX_OUTPUT],
        "stderr": done.stderr.decode("utf-8", "replace")[-2000:],
        "timed_out": False,
    }


def read(path: str | Path) -> str | None:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_OUTPUT)
    except OSError:
        return None


def trim(name: str, text: str | None) -> str | None:
    """The module list in full says what else the host runs."""
    if name != "modules" or text is None:
        return text
    return "\n".join(match.group(1) for match in MODULES.finditer(text))


def kernel_log(timeout: float) -> list[str] | None:
    """NVIDIA's and the PCI error lines of this boot; null where the log cannot be read."""
    for argv in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        answer = run(argv, timeout)
        if answer["rc"] == 0:
            lines = [line for line in answer["stdout"].splitlines() if "NVRM" in line or "AER:" in line]
            return lines[-200:]
    return None


def pci_gpus() -> list[dict[str, Any]]:
    """NVIDIA's display and 3D controllers, whether a driver runs them or not."""
    found = []
    for folder in pci_devices():
        vendor, kind = read(folder / "vendor"), read(folder / "class")
        if vendor is None or kind is None or vendor.strip() != "0x10de" or not kind.startswith("0x03"):
            continue
        names = ("numa_node", "current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
        values = {name: (read(folder / name) or "").strip() for name in names}
        driver = (folder / "driver").resolve().name if (folder / "driver").exists() else None
        found.append(dict(values, address=folder.name, driver=driver))
    return found


def pci_devices() -> list[Path]:
    return sorted(Path("/sys/bus/pci/devices").glob("*"))


def acs_bridges() -> list[dict[str, Any]] | None:
    """ACS control bits of PCI bridges that have the capability; null where the space cannot be read."""
    found = []
    for folder in pci_devices():
        if not (read(folder / "class") or "").startswith("0x0604"):
            continue
        try:
            with (folder / "config").open("rb") as file:
                space = file.read(4096)
        except OSError:
            return None
        if len(space) <= 256:  # only root sees the extended space
            return None
        control = acs_control(space)
        if control is not None:
            found.append({"address": folder.name, "control": control})
    return found


def acs_control(space: bytes) -> int | None:
    offset = 0x100
    for _ in range(64):
        if offset < 0x100 or offset + 8 > len(space):
            return None
        (header,) = struct.unpack_from("<I", space, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == EXT_CAP_ACS:
            return int(struct.unpack_from("<H", space, offset + 6)[0])
        offset = header >> 20
    return None


def docker(timeout: float) -> dict[str, Any] | None:
    """The engine's version and runtimes, and the containers of ours; null where docker is not installed."""
    info = run(["docker", "info", "--format", "{{json .}}"], timeout)
    if info["rc"] is None and not info["timed_out"]:
        return None
    try:
        fields = json.loads(info["stdout"])
    except ValueError:
        fields = {}
    kept = {name: fields[name] for name in DOCKER_FIELDS if name in fields}
    kept["Runtimes"] = sorted(fields.get("Runtimes") or {})
    listing = [
        "docker",
        "ps",
        "--all",
        "--filter",
        "label=ddtree.service",
        "--format",
        "{{.Names}} {{.State}}",
    ]
    listed = run(listing, timeout)
    error = "" if fields.get("ServerVersion") else (info["stderr"] or "no answer").strip()[-500:]
    return {"info": kept, "error": error, "containers": listed["stdout"].splitlines()}


def cdi() -> dict[str, list[str]]:
    """Driver versions that the CDI specifications name, by file."""
    found = {}
    for path in CDI_SPECS:
        text = read(path)
        if text is not None:
            found[path] = sorted(set(re.findall(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", text)))
    return found


def disk(path: str) -> dict[str, Any]:
    """Free and total bytes of the file system that holds (or would hold) the path."""
    wanted = Path(path)
    place = wanted
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    return {
        "exists": place == wanted,
        "free": space.f_bavail * space.f_frsize,
        "total": space.f_blocks * space.f_frsize,
        "fstype": fstype(place.resolve()),
    }


def fstype(path: Path) -> str | None:
    best, kind = "", None
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def container_gpus(image: str, timeout: float) -> dict[str, Any] | None:
    """What nvidia-smi -L says inside a container; null where the image is not on the host yet."""
    if run(["docker", "image", "inspect", image], timeout)["rc"] != 0:
        return None
    options = ["--rm", "--gpus", "all", "--network", "none", "--entrypoint", "nvidia-smi"]
    return run(["docker", "run", *options, image, "-L"], timeout * 3)


if __name__ == "__main__":
    main()
