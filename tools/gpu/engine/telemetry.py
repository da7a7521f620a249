"""What every card did while a plan ran: nvidia-smi once a second, from a process of its own."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = (
    "index",
    "uuid",
    "clocks.sm",
    "power.draw",
    "temperature.gpu",
    "utilization.gpu",
    "clocks_event_reasons.active",
)
# Bits of the last field, from nvidia-smi's documentation: hardware slowdown, thermal (software, hardware),
# power brake. The power cap is told apart: a card at its cap is slower, but as it should be.
SLOWED, CAPPED = 0x8 | 0x20 | 0x40 | 0x80, 0x4


@contextlib.contextmanager
def watched(log: Path) -> Iterator[None]:
    """Samples of all cards go to `log`, a line a card and second; none where there is no nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", "1000"]
    with log.open("w") as file, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            process = subprocess.Popen(query, stdout=file, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def by_card(text: str) -> dict[str, dict[str, Any]]:
    """Card -> its samples in short; lines that are cut or not numbers are left out.

    MHz, W and C while the card was busy (half of its time or more), and how many samples were slowed down.
    """
    found: dict[str, list[tuple[float, float, float, float, int]]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        with contextlib.suppress(ValueError):
            index, _, clock, power, heat, busy, reasons = parts
            sample = (float(clock), float(power), float(heat), float(busy), int(reasons, 16))
            found.setdefault(index, []).append(sample)
    return {index: _short(samples) for index, samples in sorted(found.items(), key=lambda one: int(one[0]))}


def _short(samples: list[tuple[float, float, float, float, int]]) -> dict[str, Any]:
    busy = [sample for sample in samples if sample[3] >= 50]
    figures: dict[str, Any] = {"samples": len(samples), "busy": len(busy)}
    if busy:
        figures["clock_mhz"] = [min(s[0] for s in busy), statistics.median(s[0] for s in busy)]
        figures["power_w"] = [statistics.median(s[1] for s in busy), max(s[1] for s in busy)]
    figures["hottest_c"] = max(sample[2] for sample in samples)
    figures["slowed"] = sum(bool(sample[4] & SLOWED) for sample in samples)
    figures["at_power_cap"] = sum(bool(sample[4] & CAPPED) for sample in samples)
    return figures
