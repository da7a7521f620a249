"""What GPUs do while a sweep loads them: lines of nvidia-smi, and in short for the requests of a cell.

What a card does not tell stays null; a card that nobody looked at has no figures at all, and never zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from ddtree_ops.schemas.results import CardUse, RequestRow

FIELDS = (
    "uuid",
    "index",
    "utilization.gpu",
    "power.draw",
    "clocks.sm",
    "temperature.gpu",
    "memory.used",
    "clocks_event_reasons.active",
)
#: Bits of the last field, from NVML's documentation (nvmlClocksEventReasons). Its other bits are no slowdown:
#: an idle card, clocks that were asked for.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
#: A card at its power cap is slower, but as it should be; the others are a fault of the machine.
FAULTS = frozenset(REASONS.values()) - {"power cap"}


@dataclass(frozen=True)
class CardSample:
    """One card at one moment. Null: the card does not say.

    at  Unix time, of this machine; percent, W, MHz, degrees C, MiB
    """

    at: float
    host: str
    gpu: str
    card: int | None
    utilization: float | None
    power: float | None
    clock: float | None
    temperature: float | None
    memory: float | None
    reasons: int | None


class CardSampler(Protocol):
    """Looks at the cards of hosts while it runs."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """End looking; samples stay. Harmless when repeated."""
        ...

    def samples(self) -> Mapping[str, Sequence[CardSample]]:
        """All so far, in order, by GPU."""
        ...

    def trouble(self, host: str) -> str | None:
        """Why nothing is seen of a host, in words; null while all is well."""
        ...


def query(period_ms: int) -> str:
    """The shell command that prints a line for each card, again and again."""
    return f"exec nvidia-smi --query-gpu={','.join(FIELDS)} --format=csv,noheader,nounits -lms {period_ms}"


def parse_sample(line: str, *, host: str, at: float) -> CardSample | None:
    """A line of the query; null for one that is cut or something else."""
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(FIELDS) or not words[0].startswith(("GPU-", "MIG-")):
        return None
    index = _number(words[1])
    return CardSample(
        at=at,
        host=host,
        gpu=words[0],
        card=None if index is None else int(index),
        utilization=_number(words[2]),
        power=_number(words[3]),
        clock=_number(words[4]),
        temperature=_number(words[5]),
        memory=_number(words[6]),
        reasons=_bits(words[7]),
    )


def card_uses(
    rows: Iterable[RequestRow], sampler: CardSampler | None
) -> tuple[list[CardUse] | None, str | None]:
    """What each GPU did while it answered requests of these rows; null where none was seen.

    The second value says what was not seen and why; null where every GPU was.
    """
    by_gpu: dict[str, list[RequestRow]] = {}
    hosts: dict[str, str] = {}
    for row in rows:
        if row.replica is not None:
            for gpu in row.replica.gpus:
                by_gpu.setdefault(gpu, []).append(row)
                hosts[gpu] = row.replica.host
    if not by_gpu:
        return None, "no GPU of the service is known"
    samples = sampler.samples() if sampler is not None else {}
    uses = {gpu: _use(mine, samples.get(gpu, ())) for gpu, mine in by_gpu.items()}
    found = sorted((use for use in uses.values() if use is not None), key=_order)
    missing = [gpu for gpu, use in uses.items() if use is None]
    if not missing:
        return found, None
    why = [f"nothing was seen of {', '.join(f'{hosts[gpu]}/{gpu}' for gpu in missing)}"]
    for host in sorted({hosts[gpu] for gpu in missing}):
        trouble = sampler.trouble(host) if sampler is not None else "nobody looked"
        why += [f"{host}: {trouble}"] if trouble else []
    return found or None, "; ".join(why)


def faults(uses: Iterable[CardUse]) -> list[str]:
    """Slowdowns that no sound machine has, in words."""
    return [
        f"{use.host}/{use.gpu}: {reason} in {count} of {use.samples} samples"
        for use in uses
        for reason, count in use.slowed.items()
        if reason in FAULTS
    ]


def _use(rows: Sequence[RequestRow], samples: Sequence[CardSample]) -> CardUse | None:
    if not samples:
        return None
    spans = merged((row.sent_at, row.sent_at + row.e2e_s) for row in rows if row.e2e_s)
    begins = [begin for begin, _ in spans]

    def inside(sample: CardSample) -> bool:
        number = bisect_right(begins, sample.at) - 1
        return number >= 0 and sample.at <= spans[number][1]

    seen = [sample for sample in samples if inside(sample)]
    if not seen:
        return None
    slowed = Counter(
        name for sample in seen for bit, name in REASONS.items() if sample.reasons and sample.reasons & bit
    )
    power, clock = _known(one.power for one in seen), _known(one.clock for one in seen)
    utilization = _known(one.utilization for one in seen)
    return CardUse(
        host=seen[0].host,
        gpu=seen[0].gpu,
        card=seen[0].card,
        samples=len(seen),
        requests=len(rows),
        requests_before=sum(row.sent_at + (row.e2e_s or 0.0) < samples[0].at for row in rows),
        utilization=fmean(utilization) if utilization else None,
        power_w=fmean(power) if power else None,
        power_max_w=max(power, default=None),
        sm_clock_mhz=fmean(clock) if clock else None,
        sm_clock_min_mhz=min(clock, default=None),
        temperature_max_c=max(_known(one.temperature for one in seen), default=None),
        memory_max_mib=max(_known(one.memory for one in seen), default=None),
        slowed=dict(sorted(slowed.items())),
        reasons_known=any(one.reasons is not None for one in seen),
    )


def _order(use: CardUse) -> tuple[str, int, str]:
    return use.host, -1 if use.card is None else use.card, use.gpu


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time in order and without overlaps."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _number(word: str) -> float | None:
    """`[N/A]` and `[Not Supported]` are no numbers."""
    try:
        return float(word)
    except ValueError:
        return None


def _bits(word: str) -> int | None:
    try:
        return int(word, 16)
    except ValueError:
        return None
