"""The pictures of a report. Each is drawn twice: as SVG for the page and as PNG for everything else.

Drawing is deterministic: fixed sizes and SVG salt, no dates, no global state (pyplot is not used).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ddtree_ops.compare.analysis import Analysis
from ddtree_ops.compare.drawing import (
    WIDTH_IN,
    Picture,
    bars,
    canvas,
    describe,
    legend,
    room,
    style,
    suffix,
)
from ddtree_ops.compare.load import Cell, Load
from ddtree_ops.compare.measures import STAGES, Measures, differences
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.theme import BUDGET_MARKERS, BUILDER_MARKERS, MARKS, Theme
from ddtree_ops.compare.verdicts import Metric, Verdict
from ddtree_ops.schemas.arms import Arm


def pictures(analysis: Analysis, load: Load) -> list[Picture]:
    """The pictures of one load point, from its complete cells; one whose data the run lacks is left out."""
    here = [item for item in analysis.measures if item.cell.load == load and item.cell.complete]
    makers = (
        _accept_length_picture,
        _ratio_picture,
        _speed_picture,
        _position_picture,
        _stage_picture,
        _parity_picture,
    )
    drawn = [make(here, analysis, suffix(load)) for make in makers]
    return [picture for picture in drawn if picture is not None]


def concurrency_picture(analysis: Analysis, temperature: float) -> Picture | None:
    """Speed of each ``ddtree`` budget over ``dflash`` against concurrency; None below two concurrencies."""
    judged = [
        verdict
        for verdict in analysis.verdicts
        if verdict.metric is Metric.TOKENS_PER_SECOND
        and verdict.cell.arm is Arm.DDTREE
        and verdict.baseline is Arm.DFLASH
        and verdict.cell.spec.temperature == temperature
        and verdict.ratio is not None
    ]
    concurrencies = sorted({verdict.cell.spec.concurrency for verdict in judged})
    if len(concurrencies) < 2:
        return None

    def draw(theme: Theme) -> Figure:
        figure, axes = canvas(
            theme, "times the tokens per second of dflash", "concurrent requests (log scale)"
        )
        axes.axhline(1.0, color=theme["dflash"], linestyle="--", linewidth=1.2)
        trees = {verdict.cell.label: verdict.cell for verdict in judged}
        for cell, index, line in _told_apart(list(trees.values())):
            mine = [verdict for verdict in judged if verdict.cell.label == cell.label]
            mine.sort(key=lambda verdict: verdict.cell.spec.concurrency)
            shift = 2 ** (0.05 * (index - 1.5))
            _series(
                axes,
                [verdict.cell.spec.concurrency * shift for verdict in mine],
                [verdict.ratio for verdict in mine if verdict.ratio],
                color=theme[f"budget-{index + 1}"],
                marker=BUDGET_MARKERS[index],
                line=line,
                label=cell.label,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(value) for value in concurrencies])
        axes.minorticks_off()
        legend(figure, theme)
        return figure

    return Picture(
        f"concurrency-t{temperature:g}".replace(".", "_"),
        "Speed over dflash, by concurrency",
        "Above the dashed line a tree is faster than the chain at that load. Vertical bars: 95 % intervals.",
        describe((f"{v.cell.label} at {v.cell.spec.concurrency}", v.ratio) for v in judged),
        draw,
    )


def _accept_length_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    trees = _with_budget(here, Arm.DDTREE)
    shadows = [item for item in _with_budget(here, Arm.SHADOW) if item.shadow_estimate]
    unsafe = _with_budget(here, Arm.UNSAFE)
    if not trees and not shadows:
        return None

    def draw(theme: Theme) -> Figure:
        figure, axes = canvas(theme, "tokens per target pass", "budget (tree nodes without the root)")
        _level(axes, theme, _only(here, Arm.AR), Arm.AR, lambda item: item.accept_length)
        _level(axes, theme, _only(here, Arm.DFLASH), Arm.DFLASH, lambda item: item.accept_length)
        _arm_series(axes, theme, trees, Arm.DDTREE, lambda item: item.accept_length, 0.0, "ddtree")
        _arm_series(
            axes, theme, shadows, Arm.SHADOW, lambda item: item.shadow_estimate, 0.1, "shadow's estimate"
        )
        _arm_series(
            axes, theme, unsafe, Arm.UNSAFE, lambda item: item.accept_length, -0.2, "unsafe (wrong output)"
        )
        _budget_axis(axes, [*trees, *shadows, *unsafe])
        axes.set_ylim(bottom=0.9)
        legend(figure, theme)
        return figure

    trust = " Shadow's estimate beside ddtree shows how far to trust logged trees." if shadows else ""
    named = [(item.cell.label, item.accept_length) for item in here if item.cell.arm is not Arm.SHADOW]
    named += [(f"{item.cell.label} (estimate)", item.shadow_estimate) for item in shadows]
    return Picture(
        f"accept-length{suffix}",
        "Accept length against budget",
        "Tokens that one pass of the target yields while decoding; ar is 1 by definition. Bars and the band: "
        f"95 % intervals over prompts.{trust}",
        describe(named),
        draw,
    )


def _ratio_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    judged = {
        metric: [
            verdict
            for verdict in analysis.verdicts
            if verdict.metric is metric
            and verdict.baseline is Arm.DFLASH
            and verdict.ratio is not None
            and any(verdict.cell is item.cell for item in here)
        ]
        for metric in Metric
    }
    labels = [verdict.cell.label for verdict in judged[Metric.ACCEPT_LENGTH]]
    if not labels:
        return None

    def draw(theme: Theme) -> Figure:
        height = max(1.15 + 0.27 * len(labels), 2.0)
        figure = Figure(figsize=(WIDTH_IN, height))
        left, right = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(
            left=room(labels) / WIDTH_IN,
            right=1 - 0.12 / WIDTH_IN,
            top=1 - 0.36 / height,
            bottom=0.5 / height,
            wspace=0.12,
        )
        for axes, metric in ((left, Metric.ACCEPT_LENGTH), (right, Metric.TOKENS_PER_SECOND)):
            style(axes, theme)
            axes.grid(visible=False, axis="y")
            axes.grid(visible=True, axis="x", color=theme["grid"], linewidth=0.6)
            _forest(axes, theme, judged[metric], labels)
            axes.set_title(metric.words, loc="left", fontsize=8.5, color=theme["muted"], pad=7)
            axes.spines["left"].set_visible(False)
        left.set_yticks(range(len(labels)), labels, color=theme["ink"])
        left.set_ylim(len(labels) - 0.4, -0.6)
        figure.text(
            room(labels) / WIDTH_IN,
            0.08 / height,
            "times dflash, same prompts",
            color=theme["muted"],
            va="bottom",
        )
        return figure

    return Picture(
        f"ratio{suffix}",
        "Gain over dflash, paired by prompt",
        "Each arm over dflash on the same prompts. A bar (95 % interval) that crosses the line at 1 means "
        "that one can't tell. Filled: verdict given; hollow: can't tell.",
        describe((f"{v.cell.label}, {v.metric.words}", v.ratio) for metric in Metric for v in judged[metric]),
        draw,
    )


def _speed_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    timed = [item for item in here if item.tokens_per_second and item.cell.budget is not None]
    if not timed:
        return None

    def draw(theme: Theme) -> Figure:
        figure, axes = canvas(theme, "tokens per second and request", "budget (tree nodes without the root)")
        for arm in (Arm.AR, Arm.DFLASH):
            _level(axes, theme, _only(here, arm), arm, lambda item: item.tokens_per_second)
        for arm, shift, label in (
            (Arm.DDTREE, 0.0, "ddtree"),
            (Arm.SHADOW, 0.1, "shadow"),
            (Arm.UNSAFE, -0.2, "unsafe (wrong output)"),
        ):
            mine = _with_budget(timed, arm)
            _arm_series(axes, theme, mine, arm, lambda item: item.tokens_per_second, shift, label)
        _budget_axis(axes, timed)
        axes.set_ylim(bottom=0)
        legend(figure, theme)
        return figure

    caption = (
        "Completion tokens over request time, prefill included. Bars and bands: 95 % intervals over prompts."
    )
    if analysis.on_cpu_engine:
        caption += " On this CPU engine the speed itself is not the point: see the method notes."
    return Picture(
        f"speed{suffix}",
        "Tokens per second against budget",
        caption,
        describe((item.cell.label, item.tokens_per_second) for item in here),
        draw,
    )


def _position_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    trees = [item for item in _with_budget(here, Arm.DDTREE) if sum(item.histogram)]
    chain = [item for item in _only(here, Arm.DFLASH) if sum(item.histogram)]
    shown = [*chain, *trees]
    if not shown:
        return None
    depth = max(_depth(item.histogram) for item in shown)

    def draw(theme: Theme) -> Figure:
        figure, axes = canvas(theme, "share of steps", "drafts accepted, at least")
        for item in chain:
            mark = MARKS[Arm.DFLASH]
            _curve(axes, item, depth, theme["dflash"], mark.marker, mark.line, "dflash")
        for item, index, line in _told_apart(trees):
            _curve(
                axes, item, depth, theme[f"budget-{index + 1}"], BUDGET_MARKERS[index], line, item.cell.label
            )
        axes.set_xlim(0.6, depth + 0.4)
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend(figure, theme, columns=3 if all(len(item.cell.label) < 14 for item in shown) else 2)
        return figure

    texts = [
        f"{item.cell.label}: {', '.join(f'{x:.0%}' for x in survival(item.histogram)[:4])}" for item in shown
    ]
    return Picture(
        f"positions{suffix}",
        "How deep steps accept",
        "Share of verify steps that accept at least so many drafts. The area under a curve is the accept "
        "length less one.",
        "Share of steps that accept at least 1, 2, 3, 4 drafts. " + "; ".join(texts) + ".",
        draw,
    )


def _stage_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    timed = [item for item in here if item.stage_ms and sum(item.stage_ms.values()) > 0]
    if not timed:
        return None

    def draw(theme: Theme) -> Figure:
        height = 1.23 + 0.235 * len(timed)
        figure, axes = canvas(
            theme,
            "",
            "milliseconds per target pass",
            height=height,
            left=room([item.cell.label for item in timed]),
        )
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=theme["grid"], linewidth=0.6)
        for stage in STAGES:
            starts = [sum(_stage(item, name) for name in STAGES[: STAGES.index(stage)]) for item in timed]
            axes.barh(
                range(len(timed)),
                [_stage(item, stage) for item in timed],
                left=starts,
                height=0.66,
                color=theme[stage],
                edgecolor=theme["paper"],
                linewidth=0.5,
                label=stage,
            )
        axes.set_yticks(range(len(timed)), [item.cell.label for item in timed], color=theme["ink"])
        axes.set_ylim(len(timed) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        legend(figure, theme, columns=4)
        return figure

    texts = [
        f"{item.cell.label}: " + ", ".join(f"{stage} {_stage(item, stage):.1f}" for stage in STAGES)
        for item in timed
    ]
    return Picture(
        f"stages{suffix}",
        "Where a step's time goes",
        "Mean time of each stage per target pass. commit includes KV compaction and the replay of the "
        "recurrent state.",
        "Milliseconds per target pass. " + "; ".join(texts) + ".",
        draw,
    )


def _parity_picture(here: Sequence[Measures], analysis: Analysis, suffix: str) -> Picture | None:
    reference = next((item for item in here if item.cell.arm is Arm.AR), None)
    if reference is None or reference.cell.spec.temperature > 0:
        return None
    curves = []
    for item in here:
        if item is reference:
            continue
        found = differences(item.cell, reference.cell)
        if found:
            curves.append((item, list(found.values())))
    if not curves:
        return None
    length = reference.cell.spec.max_tokens

    def draw(theme: Theme) -> Figure:
        figure, axes = canvas(theme, "share of prompts still equal to ar", "output token")
        labelled = set()
        for item, places in curves:
            arm = item.cell.arm
            xs, ys = _still_equal(places, length)
            label = "unsafe (wrong output)" if arm is Arm.UNSAFE else arm.value
            axes.step(
                xs,
                ys,
                where="post",
                color=theme[arm.value],
                linestyle=MARKS[arm].line,
                linewidth=2.0 if arm is Arm.UNSAFE else 1.5,
                label="_" if label in labelled else label,
                clip_on=False,
            )
            labelled.add(label)
        axes.set_xlim(0, length)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend(figure, theme)
        return figure

    texts = [
        f"{item.cell.label}: {places.count(None)} of {len(places)} prompts equal to the end"
        for item, places in curves
    ]
    return Picture(
        f"parity{suffix}",
        "Greedy output beside ar's",
        "Share of prompts whose output equals ar's up to a token. A lossless arm stays at 100 %, near-ties "
        "apart; each step down is a prompt's first differing token.",
        "; ".join(texts) + ".",
        draw,
    )


def survival(histogram: Sequence[int]) -> list[float]:
    """Share of steps that accept at least k drafts, for k = 1, 2, ..."""
    steps = sum(histogram)
    return [sum(histogram[k:]) / steps for k in range(1, len(histogram))] if steps else []


def _depth(histogram: Sequence[int]) -> int:
    """The deepest place that one step in two hundred reaches: past it every curve lies on the axis."""
    return max((k for k, share in enumerate(survival(histogram), start=1) if share >= 0.005), default=1)


def _curve(axes: Axes, item: Measures, depth: int, colour: str, marker: str, line: str, label: str) -> None:
    shares = (survival(item.histogram) + [0.0] * depth)[:depth]
    axes.plot(
        range(1, depth + 1), shares, color=colour, marker=marker, markersize=3.6, linestyle=line, label=label
    )


def _still_equal(places: Sequence[int | None], length: int) -> tuple[list[int], list[float]]:
    ends = sorted(place for place in places if place is not None)
    xs, ys = [0], [1.0]
    for done, place in enumerate(ends, start=1):
        xs.append(place)
        ys.append(1 - done / len(places))
    return [*xs, length], [*ys, ys[-1]]


def _stage(item: Measures, stage: str) -> float:
    return (item.stage_ms or {}).get(stage, 0.0)


def _level(
    axes: Axes,
    theme: Theme,
    measures: Sequence[Measures],
    arm: Arm,
    figure_of: Callable[[Measures], Interval | None],
) -> None:
    """An arm without budgets: a line across the picture, with its interval as a band."""
    for item in measures:
        interval = figure_of(item)
        if interval is None:
            continue
        if interval.low is not None and interval.high is not None and interval.low < interval.high:
            axes.axhspan(interval.low, interval.high, color=theme[arm.value], alpha=0.13, linewidth=0)
        axes.axhline(
            interval.value, color=theme[arm.value], linestyle=MARKS[arm].line, linewidth=1.4, label=arm.value
        )


def _arm_series(
    axes: Axes,
    theme: Theme,
    measures: Sequence[Measures],
    arm: Arm,
    figure_of: Callable[[Measures], Interval | None],
    shift: float,
    label: str,
) -> None:
    """One line for each builder that the arm was run with; the first keeps the arm's own line and fill."""
    mark = MARKS[arm]
    builders = sorted({item.cell.builder for item in measures if item.cell.builder is not None})
    for index, builder in enumerate(builders):
        known = [
            (item, interval)
            for item in measures
            if item.cell.builder is builder and (interval := figure_of(item)) is not None
        ]
        if not known:
            continue
        _series(
            axes,
            [_place(item.cell.budget) + shift - 0.1 * index for item, _ in known],
            [interval for _, interval in known],
            color=theme[arm.value],
            marker=mark.marker if index == 0 else BUILDER_MARKERS[index - 1],
            line=mark.line if index == 0 else "-.",
            face=theme[arm.value] if mark.filled and index == 0 else theme["paper"],
            label=label if len(builders) == 1 else f"{label}, {builder.value}",
        )


def _series(
    axes: Axes,
    xs: Sequence[float],
    intervals: Sequence[Interval],
    *,
    color: str,
    marker: str,
    label: str,
    line: str = "-",
    face: str | None = None,
) -> None:
    axes.errorbar(
        xs,
        [interval.value for interval in intervals],
        yerr=bars(intervals),
        color=color,
        marker=marker,
        linestyle=line,
        markerfacecolor=face or color,
        elinewidth=1.1,
        label=label,
        zorder=3,
    )


def _forest(axes: Axes, theme: Theme, verdicts: Sequence[Verdict], labels: Sequence[str]) -> None:
    axes.axvline(1.0, color=theme["dflash"], linestyle="--", linewidth=1.2)
    low, high = 1.0, 1.0
    for verdict in verdicts:
        ratio = verdict.ratio
        if ratio is None or verdict.cell.label not in labels:
            continue
        colour = theme[verdict.cell.arm.value]
        decided = verdict.answer.value in {"faster", "slower"}
        axes.errorbar(
            [ratio.value],
            [labels.index(verdict.cell.label)],
            xerr=bars([ratio]),
            color=colour,
            marker=MARKS[verdict.cell.arm].marker,
            markerfacecolor=colour if decided else theme["paper"],
            linestyle="none",
            elinewidth=1.3,
            zorder=3,
        )
        low = min(low, ratio.value, ratio.low if ratio.low is not None else ratio.value)
        high = max(high, ratio.value, ratio.high if ratio.high is not None else ratio.value)
    margin = max(0.08 * (high - low), 0.04)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))


def _budget_axis(axes: Axes, measures: Sequence[Measures]) -> None:
    budgets = _budgets_of(item.cell.budget for item in measures)
    places = [_place(budget) for budget in budgets]
    axes.set_xticks(places, [str(budget) for budget in budgets])
    axes.set_xlim(places[0] - 0.35, places[-1] + 0.35)


_HasBudgetT = TypeVar("_HasBudgetT", Measures, Cell)


def _told_apart(items: Sequence[_HasBudgetT]) -> list[tuple[_HasBudgetT, int, str]]:
    """Each item with the index of its budget (a shade and a marker) and the line style of its builder."""
    cells = [item.cell if isinstance(item, Measures) else item for item in items]
    budgets = _budgets_of(cell.budget for cell in cells)
    builders = sorted({cell.builder for cell in cells if cell.builder is not None})
    told = []
    for item, cell in zip(items, cells, strict=True):
        shade = _shade(budgets.index(cell.budget), len(budgets)) if cell.budget is not None else 0
        line = ("-", "-.", ":")[builders.index(cell.builder)] if cell.builder is not None else "-"
        told.append((item, shade, line))
    return told


def _shade(index: int, count: int) -> int:
    """Spread the budgets over all shades, so that few of them still differ well."""
    return round(index * (len(BUDGET_MARKERS) - 1) / (count - 1)) if count > 1 else len(BUDGET_MARKERS) - 1


def _budgets_of(budgets: Iterable[int | None]) -> list[int]:
    return sorted({budget for budget in budgets if budget is not None})


def _place(budget: int | None) -> float:
    """Budgets double, so their verify widths are evenly spaced on a log scale."""
    return math.log2((budget or 0) + 1)


def _with_budget(measures: Sequence[Measures], arm: Arm) -> list[Measures]:
    mine = [item for item in measures if item.cell.arm is arm and item.cell.budget is not None]
    return sorted(mine, key=lambda item: item.cell.budget or 0)


def _only(measures: Sequence[Measures], arm: Arm) -> list[Measures]:
    return [item for item in measures if item.cell.arm is arm]
