"""Which assembler Triton uses on Hopper.

Kernels whose products have 64 rows become wgmma there, and ptxas 12.8, which Triton 3.6 calls, gives some of
them wrong operand descriptors: on an H200 nine of 24 launch configurations of one kernel faulted or were
wrong, with ptxas 12.9 and 13 none (docs/kernels.md). Triton's wheel also has a newer ptxas, for Blackwell,
which knows Hopper too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

VARIABLE = "TRITON_PTXAS_PATH"
RIGHT_SINCE = (12, 9)
HOPPER = 9


@cache
def right_ptxas() -> tuple[str, str] | None:
    """Path and version of a ptxas that is right about wgmma: Triton's choice if it is, else Blackwell's.

    None where there is none, or where Triton would not call it.
    """
    tools = triton.knobs.nvidia
    for name in ("ptxas", "ptxas_blackwell"):
        try:
            found = getattr(tools, name)
        except (AttributeError, RuntimeError):  # an older Triton; none that runs
            continue
        if tuple(map(int, found.version.split("."))) < RIGHT_SINCE:
            continue
        with assembled_by(found.path):
            # A choice made in code, `triton.knobs.nvidia.ptxas = ...`, wins over the variable.
            if tools.ptxas.path == found.path:
                return found.path, found.version
    return None


def runs_warp_groups(device: torch.device) -> bool:
    """Whether kernels of 64 rows are known to be right and fast here: on Hopper, and in the interpreter."""
    if device.type != "cuda":
        return True
    return is_hopper(device) and right_ptxas() is not None


def is_hopper(device: torch.device) -> bool:
    """Whether this card's tensor cores multiply by warp groups of its kind."""
    return device.type == "cuda" and _capability(device.index) == HOPPER


@cache
def _capability(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


@contextmanager
def assembled_by(path: str) -> Iterator[None]:
    """Kernels that are compiled inside are assembled by this ptxas."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
