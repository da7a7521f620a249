"""What of the headline plan fits into a time, and whether its servers fit side by side."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine.headline_arms import BESIDE, CARD, SERVED, TREES, WIDTHS, footprint, pools
from engine.headline_figures import LEAST_GROUPS
from engine.headline_sections import (
    CLOSING,
    PREPARING,
    SECTIONS,
    Section,
    Up,
    cost,
    floor,
    in_order,
    schedule,
)

RAW = Path(__file__).parents[3] / "results" / "h200-27b" / "raw" / "main"


def test_no_two_sections_keep_their_answers_in_one_place():
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)


def test_every_throughput_has_enough_groups_for_an_interval():
    assert all(one.count >= LEAST_GROUPS for one in SECTIONS if one.kind == "texts")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_asks_for_what_its_servers_can_do(section):
    served = BESIDE[section.beside]
    assert section.size <= served.running
    if not served.trees:
        assert section.ways == ()
        return
    trees = TREES[served.trees]
    assert section.size <= trees.running
    budgets = {str(width - 1) for width in trees.arm.config["widths"]}
    assert set(section.ways) <= budgets | ({"auto"} if trees.arm.config.get("budget") == "auto" else set())
    assert 1 < section.seconds() < 250


@pytest.mark.parametrize("name", list(BESIDE))
def test_two_servers_side_by_side_fit_on_a_card(name):
    trees = BESIDE[name].trees
    assert footprint(name) + (footprint(trees) if trees else 0) < CARD - 3


def test_the_expected_seconds_of_an_answer_are_those_that_were_measured():
    expected = {"ar": {"linear": "ar"}, "dflash": {"linear": "dflash"}}
    for arm, names in expected.items():
        rows = json.loads(lzma.decompress((RAW / f"{arm}.in-flight-1.json.xz").read_bytes()))
        section = Section("", arm, "texts")
        for way in ("linear", "31", "63"):
            taken = [row["seconds"] for row in rows if row["way"] == way]
            assert section._answer(names.get(way, way)) == pytest.approx(sum(taken) / len(taken), rel=0.25)


def test_in_one_session_all_fits_but_what_matters_least():
    planned = schedule(SECTIONS, 28 * 60 - PREPARING - CLOSING, Up())
    assert {section.part for section in SECTIONS if section not in planned} == {"alone", "fp8", "ablations"}
    assert schedule(SECTIONS, 40 * 60, Up()) == in_order(SECTIONS, Up())


def test_every_arm_starts_once_and_the_one_that_is_there_goes_on():
    up = Up("ddtree", "snapshot")
    besides = [section.beside for section in in_order(SECTIONS, up)]
    order = list(dict.fromkeys(besides))
    assert order[0] == "snapshot"
    assert order[-1] == "dflash-fp8"
    assert besides == sorted(besides, key=order.index)


def test_less_important_sections_are_dropped_first():
    dropped = set()
    for minutes in range(40, 4, -2):
        left = {one for one in SECTIONS if one not in schedule(SECTIONS, 60 * minutes, Up())}
        assert SECTIONS[0] not in left
        dropped = left
    assert any(one.part == "plain" for one in schedule(SECTIONS, 60 * 6, Up()))
    assert {one.part for one in SECTIONS} - {"plain"} <= {one.part for one in dropped}


def test_starts_are_counted_once_an_arm():
    first, second = (one for one in SECTIONS if one.beside == "unsafe")
    up = Up("ddtree", "shadow", estimated=False)
    assert cost([first, second], up) == pytest.approx(
        BESIDE["unsafe"].start + first.seconds() + second.seconds()
    )


def test_a_section_leaves_time_to_more_important_ones_and_may_use_that_of_others():
    up = Up("ddtree", "dflash", estimated=False)
    chain = next(one for one in SECTIONS if one.name == "chain.in-flight-8")
    context = next(one for one in SECTIONS if one.name == "dflash.in-flight-1-8k")
    planned = [context, chain]
    assert floor(context, planned, 200.0, up) == pytest.approx(CLOSING + cost([chain], up))
    assert floor(chain, [chain, context], 100.0, up) == CLOSING
    # Not for ever, though.
    assert floor(chain, [chain, context], 10_000.0, up) > 9_000


@pytest.mark.parametrize(("running", "graphs"), [(1, "1"), (4, "1 2 4"), (6, "1 2 4 6"), (16, "1 2 4 8 16")])
def test_pools_and_graphs_are_those_of_the_most_requests(running, graphs):
    text = " ".join(pools(running))
    assert f"--max-running-requests {running} " in text
    assert text.endswith(f"--cuda-graph-bs-decode {graphs}")


def test_the_trees_have_every_width_that_the_targets_name():
    assert SERVED["ddtree"].arm.config["widths"] == list(WIDTHS) == [8, 16, 32, 64, 128]
