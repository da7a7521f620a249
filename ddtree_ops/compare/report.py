"""Write the report of a run: one self-contained ``index.html``, with PNG and CSV files beside it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from ddtree_ops import __version__
from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.drawing import Picture
from ddtree_ops.compare.frames import requests_frame
from ddtree_ops.compare.headline import headline
from ddtree_ops.compare.layout_view import layout_pictures, layout_view, layouts_csv
from ddtree_ops.compare.plots import concurrency_picture, pictures
from ddtree_ops.compare.summary import summarise
from ddtree_ops.compare.theme import css_variables
from ddtree_ops.compare.view import build_view
from ddtree_ops.errors import BadEnvironment, BadInput

TEMPLATES = Path(__file__).parent / "templates"
COMMANDS = ("ddtree bench sweep sweep.yaml --results results", "ddtree compare report results --out report")


@dataclass(frozen=True)
class ReportFiles:
    """What was written. ``headline`` is the report's one sentence."""

    index: Path
    images: tuple[Path, ...]
    tables: tuple[Path, ...]
    headline: str


def write_report(
    results: Path, out: Path, *, title: str | None = None, run_id: str | None = None
) -> ReportFiles:
    """Write the report of a store's run (default: the latest) into the folder ``out``.

    The same store gives the same bytes. Files of the same name are replaced.

    Raises:
        BadInput: the store can't be read, or ``out`` is a file.
        BadEnvironment: ``out`` can't be written.
    """
    return report(analyse(results, run_id), out, title=title)


def report(analysis: Analysis, out: Path, *, title: str | None = None) -> ReportFiles:
    """As :func:`write_report`, of a run that is analysed already."""
    page = render(analysis, title=title)
    try:
        return _write(analysis, out, page)
    except FileExistsError as error:
        raise BadInput(f"{out}: is a file; give a folder for the report") from error
    except OSError as error:
        full = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise BadEnvironment(f"{out}: cannot be written: {full}") from error


def render(analysis: Analysis, *, title: str | None = None) -> str:
    """The page alone, as HTML."""
    view = build_view(analysis, title)
    origin = analysis.results.run.origin
    drawn = zip(analysis.results.loads(), view["loads"], strict=True)
    view |= {
        "pictures": {item.anchor: [_inlined(p) for p in pictures(analysis, load)] for load, item in drawn},
        "concurrency_pictures": [_inlined(picture) for picture in _over_concurrency(analysis)],
        "layouts": layout_view(analysis.layouts, analysis.together),
        "layout_pictures": [
            _inlined(picture) for picture in layout_pictures(analysis.layouts, analysis.together)
        ],
        "tables": sorted(_tables(analysis)),
        "css": _css(),
        "version": __version__,
        "commands": COMMANDS if origin is None else origin.commands,
    }
    return _environment().get_template("report.html.j2").render(view)


def cells_csv(analysis: Analysis) -> pd.DataFrame:
    """One row a cell: its figures with intervals, parity counts and counters, flattened."""
    rows = []
    for cell in summarise(analysis)["cells"]:
        cell.pop("cards")  # several rows a cell: summary.json has them
        rows.append(_flat(cell))
    return pd.DataFrame(rows)


def verdicts_csv(analysis: Analysis) -> pd.DataFrame:
    """One row a verdict."""
    columns = ("arm", "budget", "builder", "concurrency", "temperature", "baseline", "metric", "verdict")
    rows = [_flat(item) for item in summarise(analysis)["verdicts"]]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns))


#: Files beside the page, and what makes them.
TABLES: dict[str, Callable[[Analysis], pd.DataFrame]] = {
    "cells.csv": cells_csv,
    "requests.csv": lambda analysis: requests_frame(analysis.results),
    "verdicts.csv": verdicts_csv,
}


def _tables(analysis: Analysis) -> dict[str, Callable[[Analysis], pd.DataFrame]]:
    """The files of this run: layouts where it has some."""
    if not analysis.layouts:
        return TABLES
    return {**TABLES, "layouts.csv": lambda analysis: layouts_csv(analysis.layouts)}


def _write(analysis: Analysis, out: Path, page: str) -> ReportFiles:
    out.mkdir(parents=True, exist_ok=True)
    images, tables = [], []
    every = [picture for load in analysis.results.loads() for picture in pictures(analysis, load)]
    for picture in every + _over_concurrency(analysis) + _layouts(analysis):
        images.append(out / f"{picture.name}.png")
        images[-1].write_bytes(picture.png())
    for name, make in _tables(analysis).items():
        tables.append(out / name)
        make(analysis).to_csv(tables[-1], index=False)
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return ReportFiles(index, tuple(images), tuple(tables), headline(analysis).text)


def _over_concurrency(analysis: Analysis) -> list[Picture]:
    temperatures = sorted({load.temperature for load in analysis.results.loads()})
    drawn = (concurrency_picture(analysis, temperature) for temperature in temperatures)
    return [picture for picture in drawn if picture is not None]


def _layouts(analysis: Analysis) -> list[Picture]:
    return layout_pictures(analysis.layouts, analysis.together)


def _inlined(picture: Picture) -> dict[str, Any]:
    """For the template; the SVG is ours, so it is not escaped."""
    words = {"name": picture.name, "title": picture.title, "caption": picture.caption}
    return {**words, "svg": Markup(picture.svg())}


def _css() -> Markup:
    """The style sheet with both palettes; it is ours, so it is not escaped."""
    sheet = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    light = f":root {{ {css_variables(dark=False)} }}"
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} }} }}"
    return Markup(f"{light}\n{dark}\n{sheet}")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat
