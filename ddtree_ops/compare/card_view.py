"""What GPUs did while cells were loaded, as the report shows it; and what nobody saw of that."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.compare.measures import Measures
from ddtree_ops.compare.table import DASH, Table
from ddtree_ops.schemas.results import CardUse
from ddtree_ops.services.rotation import short_place

#: What a cell leaves open that was sealed by an older version or by another program.
OLD = "nobody looked"


def cards_table(here: Sequence[Measures]) -> Table | None:
    """A row for each GPU of each cell that was sampled."""
    rows = tuple(_row(item.cell.label, use) for item in here for use in item.cell.record.cards or ())
    if not rows:
        return None
    columns = (
        "arm",
        "GPU",
        "samples",
        "busy, %",
        "power, W (largest)",
        "SM clock, MHz (lowest)",
        "hottest, °C",
        "memory, GiB",
        "held down",
    )
    caption = "What the GPUs did while the cell's requests ran on them"
    return Table(caption, columns, rows, frozenset({0, 1, 8}))


def cards_notes(here: Sequence[Measures]) -> list[str]:
    """What was not sampled, and why: each reason once with its cells."""
    missing: dict[str, list[str]] = {}
    for item in here:
        record = item.cell.record
        if record.cards_missing is not None or record.cards is None:
            missing.setdefault(record.cards_missing or OLD, []).append(item.cell.label)
    whole = len(missing) == 1 and len(next(iter(missing.values()))) == len(here)
    notes = []
    for why, cells in missing.items():
        of = "" if whole else f" for {', '.join(dict.fromkeys(cells))}"
        notes.append(f"GPUs: not sampled{of}: {why}.")
    for item in here:
        uses = item.cell.record.cards or ()
        before = sum(use.requests_before for use in uses)
        if before:
            every = sum(use.requests for use in uses)
            notes.append(
                f"{item.cell.label}: {before} of {every} requests were over before the first sample; the "
                "figures of their GPUs are of the others."
            )
    return notes


def _row(label: str, use: CardUse) -> tuple[str, ...]:
    index = "" if use.card is None else f" ({use.card})"
    memory = None if use.memory_max_mib is None else use.memory_max_mib / 1024
    held = ", ".join(f"{reason}: {count}" for reason, count in use.slowed.items()) or "never"
    return (
        label,
        f"{short_place(f'{use.host}/{use.gpu}')}{index}",
        str(use.samples),
        _number(use.utilization),
        _pair(use.power_w, use.power_max_w),
        _pair(use.sm_clock_mhz, use.sm_clock_min_mhz),
        _number(use.temperature_max_c),
        _number(memory, digits=1),
        held if use.reasons_known else "the card does not say",
    )


def _pair(mean: float | None, extreme: float | None) -> str:
    return DASH if mean is None else f"{_number(mean)} ({_number(extreme)})"


def _number(value: float | None, digits: int = 0) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
