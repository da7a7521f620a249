"""What the pictures of a report are made with: how a picture is written, axes, legends, intervals.

Drawing is deterministic: fixed sizes and SVG salt, no dates, no global state (pyplot is not used).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from ddtree_ops.compare.load import Load
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.svg import inline
from ddtree_ops.compare.theme import LIGHT, STAND_IN, Theme

WIDTH_IN, HEIGHT_IN = 4.6, 3.3
PNG_DPI = 200
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.0,
    "errorbar.capsize": 2.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0.0,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
}


@dataclass(frozen=True)
class Picture:
    """A figure with the words that go with it; ``draw`` makes it in a theme's colours."""

    name: str
    title: str
    caption: str
    description: str
    draw: Callable[[Theme], Figure]

    def svg(self) -> str:
        """An ``<svg>`` element for inlining, coloured by CSS variables."""
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name}):
            buffer = io.StringIO()
            self.draw(STAND_IN).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return inline(buffer.getvalue(), name=self.name, title=self.title, description=self.description)

    def png(self) -> bytes:
        """On white, with the title in the picture, as it may be seen without the page."""
        with mpl.rc_context(STYLE):
            figure = self.draw(LIGHT)
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + 0.32)
            figure.subplots_adjust(
                top=(figure.subplotpars.top * height) / (height + 0.32),
                bottom=(figure.subplotpars.bottom * height) / (height + 0.32),
            )
            for legend in figure.legends:
                legend.set_bbox_to_anchor((0.02, (height - 0.05) / (height + 0.32)), figure.transFigure)
            figure.text(
                0.02,
                1 - 0.1 / (height + 0.32),
                self.title,
                va="top",
                weight="bold",
                color=LIGHT["ink"],
                size=9.5,
            )
            buffer = io.BytesIO()
            figure.savefig(
                buffer, format="png", dpi=PNG_DPI, facecolor=LIGHT["paper"], metadata={"Software": None}
            )
        return buffer.getvalue()


def canvas(
    theme: Theme, ylabel: str, xlabel: str, *, height: float = HEIGHT_IN, left: float = 0.48
) -> tuple[Figure, Axes]:
    """One set of axes; the y axis is named above it, not sideways. :func:`_legend` makes room on top."""
    figure = Figure(figsize=(WIDTH_IN, height))
    axes = figure.subplots()
    figure.subplots_adjust(left=left / WIDTH_IN, right=1 - 0.12 / WIDTH_IN, bottom=0.5 / height)
    style(axes, theme)
    axes.set_xlabel(xlabel, color=theme["muted"], labelpad=5)
    if ylabel:
        axes.annotate(
            ylabel,
            (0, 1),
            xytext=(-0.36 * 72, 7),
            xycoords="axes fraction",
            textcoords="offset points",
            color=theme["muted"],
            va="bottom",
        )
    return figure, axes


def room(labels: Sequence[str]) -> float:
    """Inches that row labels need on the left."""
    return 0.2 + 0.068 * max(len(label) for label in labels)


def style(axes: Axes, theme: Theme) -> None:
    axes.grid(visible=True, axis="y", color=theme["grid"], linewidth=0.6)
    axes.tick_params(colors=theme["muted"], labelcolor=theme["ink"])
    for spine in axes.spines.values():
        spine.set_color(theme["muted"])
    axes.spines["left"].set_visible(False)
    axes.patch.set_alpha(0.0)


def legend(figure: Figure, theme: Theme, columns: int = 3) -> None:
    """Above the axes, with as many rows as it takes; the figure grows, so that the axes keep their height."""
    axes = figure.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    plain = [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
    rows = math.ceil(len(labels) / columns)
    width, height = figure.get_size_inches()
    taller = height + 0.18 * (rows - 2)
    top = 0.1 + 0.18 * rows + (0.26 if axes.texts else 0.06)
    figure.set_size_inches(width, taller)
    figure.subplots_adjust(top=1 - top / taller, bottom=figure.subplotpars.bottom * height / taller)
    figure.legend(
        plain,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.02, 1 - 0.05 / taller),
        ncols=columns,
        labelcolor=theme["ink"],
        fontsize=8.5,
    )


def bars(intervals: Sequence[Interval]) -> list[list[float]]:
    below = [item.value - item.low if item.low is not None else 0.0 for item in intervals]
    above = [item.high - item.value if item.high is not None else 0.0 for item in intervals]
    return [[max(x, 0.0) for x in below], [max(x, 0.0) for x in above]]


def describe(figures: Iterable[tuple[str, Interval | None]]) -> str:
    texts = []
    for name, interval in figures:
        if interval is None:
            continue
        text = f"{name}: {interval.value:.2f}"
        if interval.low is not None and interval.high is not None:
            text += f" ({interval.low:.2f} to {interval.high:.2f})"
        texts.append(text)
    return "; ".join(texts) + "."


def suffix(load: Load) -> str:
    return f"-c{load.concurrency}-t{load.temperature:g}".replace(".", "_")
