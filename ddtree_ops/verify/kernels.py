"""The kernel table: `python -m ddtree_kernels.bench` on one idle card, and what of it goes into a bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pydantic

from ddtree_ops.schemas.acceptance import KernelTable, KernelTarget, StageStatus

MODULE = "ddtree_kernels.bench"
#: Seconds after which the benchmark starts no further measurement, and after which it is ended.
BUDGET_S, LIMIT_S = 240, 600
#: A card that holds more than this serves somebody.
IDLE_MIB = 512
TAIL_LINES = 5


class KernelBench(Protocol):
    """Makes the table somewhere: here, or in a container on a host."""

    def run(self, folder: Path) -> KernelTable:
        """folder  for its files; those in it are this call's own."""
        ...


class NoKernels:
    """There is a reason to make no table."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, folder: Path) -> KernelTable:
        return KernelTable(status=StageStatus.SKIPPED, reason=self._reason)


class LocalKernels:
    """The benchmark as a process of this machine, on its first idle card."""

    def __init__(self, python: Sequence[str] = (sys.executable,)) -> None:
        self._python = python

    def run(self, folder: Path) -> KernelTable:
        card, reason = idle_card()
        if card is None:
            return KernelTable(status=StageStatus.SKIPPED, reason=reason)
        return self.run_on(card, folder)

    def run_on(self, card: str, folder: Path) -> KernelTable:
        """card  for CUDA_VISIBLE_DEVICES"""
        argv = [*self._python, "-m", MODULE, "--out", str(folder), "--budget-s", str(BUDGET_S)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card}
        try:
            done = subprocess.run(
                argv, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return KernelTable(status=StageStatus.FAILED, reason=f"took longer than {LIMIT_S} s")
        except OSError as error:
            return KernelTable(status=StageStatus.FAILED, reason=f"cannot be run: {error.strerror}")
        summary = folder / "summary.json"
        text = summary.read_text(encoding="utf-8") if summary.is_file() else ""
        return read_table(text, done.returncode, done.stdout + done.stderr)


def read_table(summary: str, exit_code: int, output: str) -> KernelTable:
    """From the benchmark's summary and how it ended. Its failures do not lose what was measured."""
    tail = " / ".join(output.strip().splitlines()[-TAIL_LINES:])
    if exit_code == 3:
        return KernelTable(status=StageStatus.SKIPPED, reason=tail or "no CUDA card")
    try:
        table = _table(json.loads(summary))
    except (ValueError, KeyError, TypeError, AttributeError, pydantic.ValidationError):
        return KernelTable(status=StageStatus.FAILED, reason=f"exit code {exit_code}, no table: {tail}")
    if exit_code != 0:
        missing = ", ".join(row.id for row in table.targets if row.figure is None)
        reason = f"exit code {exit_code}; without a figure: {missing or 'none'}"
        return table.model_copy(update={"status": StageStatus.FAILED, "reason": reason})
    return table


def idle_card() -> tuple[str | None, str | None]:
    """(UUID of the first card that nobody uses, null), or (null, why there is none)."""
    if shutil.which("nvidia-smi") is None:
        return None, "no CUDA card: nvidia-smi is not installed"
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi does not answer: {type(error).__name__}"
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    if done.returncode != 0 or not rows:
        return None, f"no CUDA card: {(done.stderr or done.stdout).strip()[:200]}"
    for uuid, used in rows:
        if used.strip().isdigit() and int(used) <= IDLE_MIB:
            return uuid.strip(), None
    return None, f"no idle card: all {len(rows)} hold more than {IDLE_MIB} MiB; stop a service for the table"


def _table(data: Mapping[str, Any]) -> KernelTable:
    fields = KernelTarget.model_fields
    versions = {str(key): None if value is None else str(value) for key, value in data["versions"].items()}
    return KernelTable(
        status=StageStatus.DONE,
        hardware=str(data["hardware"]),
        versions=versions,
        targets=[
            KernelTarget.model_validate({key: row[key] for key in fields if key in row})
            for row in data["targets"]
        ],
    )
