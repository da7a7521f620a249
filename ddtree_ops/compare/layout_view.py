"""Throughput by layout as the report shows it: tables, pictures and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddtree_ops.compare.drawing import WIDTH_IN, Picture, bars, describe, room, style, suffix
from ddtree_ops.compare.layouts import HostRate, Together
from ddtree_ops.compare.load import Load
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.table import DASH, Table
from ddtree_ops.compare.theme import MARKS, Theme
from ddtree_ops.compare.view import interval
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.services.rotation import short_place


@dataclass(frozen=True)
class LayoutView:
    """The section of the report."""

    rates: Table
    together: Table | None
    places: Table | None


def layout_view(rates: Sequence[HostRate], together: Sequence[Together] = ()) -> LayoutView | None:
    """None where a store has one card and one layout."""
    if not rates:
        return None
    return LayoutView(_rates_table(rates), _together_table(together), _places_table(rates))


def unit_of(rates: Sequence[HostRate]) -> str:
    """What a host's rate is divided by: GPUs where they are known."""
    return "GPU" if all(rate.layout.gpus for rate in rates) else "replica"


def layout_pictures(rates: Sequence[HostRate], together: Sequence[Together] = ()) -> list[Picture]:
    """One for each load: tokens a second of a host, and of each GPU, by layout."""
    return [
        _picture(
            [rate for rate in rates if rate.load == load], [one for one in together if one.load == load], load
        )
        for load in sorted({rate.load for rate in rates})
    ]


def layout_rows(rates: Sequence[HostRate]) -> list[dict[str, Any]]:
    """For ``summary.json``."""
    return [
        {
            "arm": rate.cell.arm.value,
            "budget": rate.cell.budget,
            "builder": rate.cell.builder.value if rate.cell.builder else None,
            "concurrency": rate.load.concurrency,
            "temperature": rate.load.temperature,
            "run_id": rate.cell.record.run_id,
            "host": rate.host,
            "replicas": rate.layout.replicas,
            "beside": rate.cell.spec.beside,
            "gpus_each": rate.layout.gpus or None,
            "tokens_per_second": _data(rate.rate),
            "tokens_per_second_each": _data(rate.each),
            "in_flight": rate.in_flight,
            "busy_together": rate.together,
            "places": [
                {"place": one.at.place, "cards": one.at.cards, "tokens_per_second": _data(one.rate)}
                for one in rate.places
            ],
        }
        for rate in rates
    ]


def together_rows(together: Sequence[Together]) -> list[dict[str, Any]]:
    """For ``summary.json``."""
    return [
        {
            "concurrency": one.load.concurrency,
            "temperature": one.load.temperature,
            "host": one.host,
            "services": list(one.services),
            "gpus": one.units if one.gpus_known else None,
            "tokens_per_second": _data(one.rate),
            "tokens_per_second_each": _data(one.each),
        }
        for one in together
    ]


def layouts_csv(rates: Sequence[HostRate]) -> pd.DataFrame:
    """One row a place of each service."""
    rows = []
    for row in layout_rows(rates):
        places = row.pop("places")
        row["beside"] = ", ".join(row["beside"] or ())
        flat = {name: value for name, value in row.items() if not isinstance(value, dict)}
        for name in ("tokens_per_second", "tokens_per_second_each"):
            flat |= {f"{name}.{key}": value for key, value in row[name].items()}
        for one in places:
            here = {f"place.{key}": value for key, value in one["tokens_per_second"].items()}
            rows.append({**flat, "place": one["place"], "cards": " ".join(map(str, one["cards"])), **here})
    return pd.DataFrame(rows)


def _rates_table(rates: Sequence[HostRate]) -> Table:
    unit = unit_of(rates)
    rows = tuple(
        (
            rate.cell.label,
            str(rate.load.concurrency),
            f"{rate.load.temperature:g}",
            _layout(rate),
            rate.host,
            interval(rate.rate, digits=1),
            interval(_each(rate, unit), digits=1),
            f"{rate.in_flight:.1f}",
            DASH if rate.together is None else f"{100 * rate.together:.0f} %",
        )
        for rate in rates
    )
    columns = (
        "arm",
        "C",
        "T",
        "layout",
        "host",
        "of the host",
        f"of each {unit}",
        "in flight",
        "all busy",
    )
    return Table("Tokens per second by layout, with 95 % intervals", columns, rows, frozenset({0, 3, 4}))


def _together_table(together: Sequence[Together]) -> Table | None:
    """Hosts whose services were loaded side by side."""
    if not together:
        return None
    rows = tuple(
        (
            ", ".join(one.services),
            str(one.load.concurrency),
            f"{one.load.temperature:g}",
            one.host,
            f"{one.units} {'GPU' if one.gpus_known else 'replica'}{'s' if one.units != 1 else ''}",
            interval(one.rate, digits=1),
            interval(one.each, digits=1),
        )
        for one in together
    )
    columns = ("services side by side", "C", "T", "host", "on", "tokens per second of the host", "of each")
    return Table("All services of a host at the same time", columns, rows, frozenset({0, 3, 4}))


def _places_table(rates: Sequence[HostRate]) -> Table | None:
    """Services that were at more than one place, place by place."""
    rows = []
    for rate in rates:
        if len(rate.places) < 2:
            continue
        fastest = max(place.rate.value for place in rate.places)
        for place in rate.places:
            where = short_place(place.at.place)
            if not place.at.gpus:
                where = f"{where} {place.at.endpoint or ''}".strip()
            cards = ", ".join(map(str, place.at.cards)) or DASH
            share = f"{100 * place.rate.value / fastest:.0f} %" if fastest else DASH
            load = (rate.cell.label, str(rate.load.concurrency), f"{rate.load.temperature:g}")
            layout = _layout(rate)
            rows.append((*load, layout, where, cards, interval(place.rate, digits=1), share))
    if not rows:
        return None
    columns = ("arm", "C", "T", "layout", "place", "GPUs (index)", "tokens per second", "of the fastest")
    return Table("The same, place by place", columns, tuple(rows), frozenset({0, 3, 4}))


def _picture(rates: Sequence[HostRate], together: Sequence[Together], load: Load) -> Picture:
    several = len({rate.host for rate in rates}) > 1
    unit = unit_of(rates)
    labels = [_label(rate, host=several) for rate in rates]
    labels += [f"all side by side{f' on {one.host}' if several else ''}" for one in together]
    arms = [rate.cell.arm for rate in rates] + [None for _ in together]
    panels: list[tuple[str, list[Interval]]] = [
        ("of the host", [*(rate.rate for rate in rates), *(one.rate for one in together)]),
        (f"of each {unit}", [*(_each(rate, unit) for rate in rates), *(one.each for one in together)]),
    ]
    named = [
        (f"{label}, {name}", one) for name, some in panels for label, one in zip(labels, some, strict=True)
    ]

    def draw(theme: Theme) -> Figure:
        height = max(1.15 + 0.27 * len(labels), 2.0)
        figure = Figure(figsize=(WIDTH_IN, height))
        drawn = figure.subplots(1, 2, sharey=True)
        left = min(room(labels), WIDTH_IN / 2)
        figure.subplots_adjust(
            left=left / WIDTH_IN,
            right=1 - 0.12 / WIDTH_IN,
            top=1 - 0.36 / height,
            bottom=0.5 / height,
            wspace=0.16,
        )
        for axes, (name, intervals) in zip(drawn, panels, strict=True):
            _panel(axes, theme, name, arms, intervals)
        drawn[0].set_yticks(range(len(labels)), labels, color=theme["ink"])
        drawn[0].set_ylim(len(labels) - 0.4, -0.6)
        figure.text(left / WIDTH_IN, 0.08 / height, "tokens per second", color=theme["muted"], va="bottom")
        return figure

    return Picture(
        f"layouts{suffix(load)}",
        f"Throughput by layout, {load}",
        "Tokens per second of all replicas of a service on a host, and the same divided by their "
        f"{'GPUs' if unit == 'GPU' else 'number'}. All replicas of a service are loaded at the same time, "
        "each at the concurrency that is named; other services only where it says so. Bars: 95 % intervals "
        "over prompts.",
        describe(named),
        draw,
    )


def _panel(
    axes: Axes, theme: Theme, name: str, arms: Sequence[Arm | None], intervals: Sequence[Interval]
) -> None:
    """arms  null: all services together"""
    style(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=theme["grid"], linewidth=0.6)
    for number, (arm, one) in enumerate(zip(arms, intervals, strict=True)):
        colour = theme[arm.value if arm is not None else "ink"]
        axes.errorbar(
            [one.value],
            [number],
            xerr=bars([one]),
            color=colour,
            marker=MARKS[arm].marker if arm is not None else "P",
            linestyle="none",
            elinewidth=1.3,
            zorder=3,
        )
    axes.set_xlim(left=0, right=1.08 * max(one.high or one.value for one in intervals))
    axes.set_title(name, loc="left", fontsize=8.5, color=theme["muted"], pad=7)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))


def _label(rate: HostRate, *, host: bool) -> str:
    where = f" on {rate.host}" if host else ""
    beside = ", beside others" if rate.cell.spec.beside else ""
    return f"{rate.cell.label}, {rate.layout}{where}{beside}"


def _layout(rate: HostRate) -> str:
    beside = rate.cell.spec.beside
    return f"{rate.layout}, beside {', '.join(beside)}" if beside else str(rate.layout)


def _each(rate: HostRate, unit: str) -> Interval:
    """What each GPU gives, or each replica, where not every layout has known GPUs."""
    return rate.each if unit == "GPU" else rate.rate.divided(rate.layout.replicas)


def _data(one: Interval) -> dict[str, Any]:
    return {"mean": one.value, "low": one.low, "high": one.high, "prompts": one.n}
