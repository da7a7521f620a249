"""Pictures: honest axes, every arm told apart without colour, and the numbers behind curves."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.drawing import STYLE, Picture
from ddtree_ops.compare.plots import pictures, survival
from ddtree_ops.compare.svg import inline
from ddtree_ops.compare.theme import BUDGET_MARKERS, COLOURS, LIGHT, MARKS, STAND_IN
from tests.support.make_store import make_store


@pytest.fixture(scope="module")
def analysis(clean_store: Path) -> Analysis:
    return analyse(clean_store)


@pytest.fixture(scope="module")
def drawn(analysis: Analysis) -> dict[str, Picture]:
    return {
        picture.name.split("-c1")[0]: picture for picture in pictures(analysis, analysis.results.loads()[0])
    }


def figure(picture: Picture) -> Figure:
    with mpl.rc_context(STYLE):
        sheet = picture.draw(LIGHT)
        sheet.draw_without_rendering()
    return sheet


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_rates_start_at_zero_and_accept_length_at_one(drawn: dict[str, Picture]) -> None:
    assert figure(drawn["speed"]).axes[0].get_ylim()[0] == 0
    assert figure(drawn["stages"]).axes[0].get_xlim()[0] == 0
    assert 0.85 <= figure(drawn["accept-length"]).axes[0].get_ylim()[0] < 1
    assert figure(drawn["positions"]).axes[0].get_ylim() == (0, 1)
    assert figure(drawn["parity"]).axes[0].get_ylim() == (0, 1)


def test_every_axis_names_its_unit(drawn: dict[str, Picture]) -> None:
    expected = {
        "accept-length": ("tokens per target pass", "budget (tree nodes without the root)"),
        "speed": ("tokens per second and request", "budget (tree nodes without the root)"),
        "positions": ("share of steps", "drafts accepted, at least"),
        "parity": ("share of prompts still equal to ar", "output token"),
    }
    for name, (vertical, horizontal) in expected.items():
        axes = figure(drawn[name]).axes[0]
        assert [text.get_text() for text in axes.texts] == [vertical]
        assert axes.get_xlabel() == horizontal
    assert figure(drawn["stages"]).axes[0].get_xlabel() == "milliseconds per target pass"


def test_budgets_stand_where_they_belong(drawn: dict[str, Picture]) -> None:
    axes = figure(drawn["accept-length"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["7", "15", "31", "63"]
    assert list(axes.get_xticks()) == [3, 4, 5, 6]


def test_shadow_is_labelled_an_estimate_and_unsafe_wrong(drawn: dict[str, Picture]) -> None:
    labels = [text.get_text() for text in figure(drawn["accept-length"]).legends[0].get_texts()]
    assert "shadow's estimate" in labels
    assert "unsafe (wrong output)" in labels


@pytest.mark.parametrize("name", ["accept-length", "ratio", "speed", "positions", "stages", "parity"])
def test_legends_and_labels_lie_inside_the_picture_and_off_the_axes(
    drawn: dict[str, Picture], name: str
) -> None:
    sheet = figure(drawn[name])
    canvas = sheet.bbox
    for axes in sheet.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 >= canvas.x0 - 1
        assert box.x1 <= canvas.x1 + 1
        assert box.y0 >= canvas.y0 - 1
        for legend in sheet.legends:
            assert legend.get_window_extent().y0 >= box.y1 - 1
    for legend in sheet.legends:
        assert legend.get_window_extent().x1 <= canvas.x1 + 1
        assert legend.get_window_extent().y1 <= canvas.y1 + 1


def test_two_builders_of_one_budget_are_told_apart(tmp_path: Path) -> None:
    import json

    path = make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), prompts=5, run_id="r1")
    make_store(path, arms=("ddtree",), prompts=5, run_id="r2", builder="spine-first")
    runs = [path / "runs" / name / "run.json" for name in ("r1", "r2")]
    first, second = (json.loads(run.read_text()) for run in runs)
    first |= {"run_id": "r3", "started": "2027-01-01T00:00:00Z", "cells": first["cells"] + second["cells"]}
    (path / "runs" / "r3").mkdir()
    (path / "runs" / "r3" / "run.json").write_text(json.dumps(first))
    both = analyse(path)
    drawn = {picture.name: picture for picture in pictures(both, both.results.loads()[0])}
    labels = [text.get_text() for text in figure(drawn["accept-length-c1-t0"]).legends[0].get_texts()]
    assert {"ddtree, best-first", "ddtree, spine-first"} <= set(labels)
    rows = [label.get_text() for label in figure(drawn["ratio-c1-t0"]).axes[0].get_yticklabels()]
    assert {"ddtree 63", "ddtree 63 spine-first"} <= set(rows)


def test_incomplete_cells_stand_in_no_picture(store: Path) -> None:
    mixed = analyse(store)
    for picture in pictures(mixed, mixed.results.loads()[0]):
        assert "shadow 15" not in picture.description
        assert "ddtree 7:" not in picture.description


def test_a_picture_is_the_same_every_time(drawn: dict[str, Picture]) -> None:
    assert drawn["accept-length"].svg() == drawn["accept-length"].svg()
    assert drawn["accept-length"].png() == drawn["accept-length"].png()


def test_series_differ_in_marker_or_line_not_only_in_colour() -> None:
    styles = [(mark.marker, mark.line) for mark in MARKS.values()]
    assert all(a[0] != b[0] for a, b in itertools.combinations(styles, 2))
    assert len(set(BUDGET_MARKERS)) == len(BUDGET_MARKERS)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("role", ["ink", "muted", "ar", "dflash", "shadow", "ddtree", "unsafe"])
def test_colours_are_readable_on_their_page(role: str, dark: bool) -> None:
    """WCAG asks 4.5 of text and 3 of graphics."""
    least = 4.5 if role in {"ink", "muted"} else 3.0
    assert contrast(COLOURS[role][dark], COLOURS["paper"][dark]) >= least


def test_stand_in_colours_are_distinct() -> None:
    assert len({STAND_IN[role] for role in COLOURS}) == len(COLOURS)


def test_survival_is_the_share_of_steps_that_accept_at_least_k() -> None:
    assert survival([2, 1, 1]) == [0.5, 0.25]
    assert survival([]) == []
    assert sum(survival([5, 3, 2])) == pytest.approx((0 * 5 + 1 * 3 + 2 * 2) / 10)


def test_what_is_not_svg_is_refused_for_inlining() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        inline("<html>", name="x", title="x", description="x")
