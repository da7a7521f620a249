"""Where a run was made: enough to tell two machines apart and to explain a number later, and no secrets."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ddtree_ops import __version__
from ddtree_ops.schemas.results import Environment

PACKAGES = ("aiohttp", "numpy", "pydantic", "safetensors", "sglang", "tokenizers", "torch", "triton")
GPU_FIELDS = ("name", "uuid", "driver_version", "vbios_version", "power.limit", "memory.total")
ENGINE_PACKAGES = ("ddtree_engine", "ddtree_kernels")


def capture_environment() -> Environment:
    """Look at this machine. Missing facts are left out, never guessed."""
    gpus = _gpus()
    cpu, cores = _cpu_model(), len(os.sched_getaffinity(0))
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return Environment(
        ddtree_version=__version__,
        git_commit=_git_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu,
        cores=cores,
        memory_gib=memory_gib,
        gpus=gpus,
        packages=_packages(),
        host_fingerprint=_fingerprint(cpu, cores, memory_gib, gpus),
    )


@cache
def engine_version() -> str:
    """The engine's version with a hash of its sources: a checkout changes and its version does not."""
    digest = hashlib.sha256()
    for package in ENGINE_PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def _fingerprint(cpu: str, cores: int, memory_gib: float, gpus: list[dict[str, Any]]) -> str:
    """A hash that stays over reboots and differs between hosts: machine id, CPU, cores, memory, cards."""
    facts = {
        "machine": _read("/etc/machine-id").strip(),
        "arch": platform.machine(),
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory_gib),
        "gpus": sorted(str(gpu.get("uuid")) for gpu in gpus),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """The checkout's commit, with `-dirty` when tracked files differ; null for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def _gpus() -> list[dict[str, Any]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    text = _output(query) or ""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]


def _output(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
