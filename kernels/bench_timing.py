"""Timing for the benchmark: medians of CUDA graph replays with intervals, and the copy bandwidth."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ddtree_kernels.bench_inputs import Shape
from torch import Tensor

REPEATS = 40
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where and at which sizes to measure."""

    shape: Shape
    device: torch.device
    tiny: bool = False

    @property
    def on_card(self) -> bool:
        """False in a rehearsal."""
        return self.device.type == "cuda"

    def widths(self, width: int) -> int:
        """A target's width, or a few nodes in a rehearsal."""
        return max(4, width // 8) if self.tiny else width

    def batches(self, batch: int) -> int:
        """A target's number of requests, or two at most in a rehearsal."""
        return min(batch, 2) if self.tiny else batch


def timed(place: Place, work: Callable[[], Any], restore: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Milliseconds of `work` as a CUDA graph: median and its 95 % interval; one plain call without a card.

    `restore` puts back what `work` overwrites, before every replay and not timed.
    """
    restore = restore or (lambda: None)
    work()
    restore()
    if not place.on_card:
        start = time.perf_counter()
        work()
        return {"milliseconds": (time.perf_counter() - start) * 1e3}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPEATS + 3):
        restore()
        before, after = _event(), _event()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    ordered = sorted(times[3:])
    # Order statistics that hold the median with 95 %, binomial with normal approximation.
    reach = int(0.98 * REPEATS**0.5) + 1
    low, high = ordered[REPEATS // 2 - reach], ordered[REPEATS // 2 + reach]
    return {"milliseconds": float(statistics.median(ordered)), "interval": [low, high]}


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


def bandwidth(place: Place) -> dict[str, Any]:
    """Bytes read and written a second: the best of two ways to copy and several sizes, 4 GiB moved or more.

    A graph's copy node is not the fastest: a kernel on all multiprocessors can pass it.
    """
    from ddtree_kernels.bench_copy import copy

    ways: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "copy_": lambda source, target: target.copy_(source),
        "kernel": copy,
    }
    rows: list[dict[str, Any]] = []
    for moved in (4, 8, 16, 32) if place.on_card else (2**-8,):
        size = int(moved * GIB / 2)
        source = torch.empty(size, dtype=torch.uint8, device=place.device).random_(0, 256).view(torch.float32)
        target = torch.empty_like(source)
        for way, run in ways.items():
            taken = timed(place, partial(run, source, target))["milliseconds"]
            rate = 2 * size / taken * 1e3
            rows.append({"way": way, "bytes": 2 * size, "milliseconds": taken, "bytes_per_second": rate})
        del source, target
    best = {way: max(row["bytes_per_second"] for row in rows if row["way"] == way) for way in ways}
    return {"bytes_per_second": max(best.values()), "by_way": best, "rows": rows}


def environment(on_card: bool) -> dict[str, Any]:
    """Card and versions."""
    import triton

    capability = torch.cuda.get_device_capability() if on_card else (0, 0)
    sglang = getattr(sys.modules.get("sglang"), "__version__", None)
    return {
        "hardware": torch.cuda.get_device_name() if on_card else "CPU, interpreted",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "capability": f"sm_{capability[0]}{capability[1]}",
            "sglang": sglang,
        },
    }


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected; NaN where anything is NaN."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())
