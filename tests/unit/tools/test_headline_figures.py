"""Figures of a headline run on rows whose figures are known."""

from __future__ import annotations

import sys
from pathlib import Path

from ddtree_ops.compare.statistics import MIN_PROMPTS

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine import headline_figures


def test_a_budget_is_picked_on_one_half_and_judged_on_the_other():
    def group(slow):
        return {
            "linear": {"tokens": 100, "seconds": 1.0, "steps": 25},
            "15": {"tokens": 100, "seconds": 2.0 if slow else 0.5, "steps": 20},
            "31": {"tokens": 100, "seconds": 0.8, "steps": 20},
        }

    rows = [
        {"group": number, "way": way, **row}
        for number in range(10)
        for way, row in group(slow=number % 2 == 1).items()
    ]
    best = headline_figures.throughput_figures(rows)["best"]
    assert best == {"budget": 15, "ratio": 0.5, "low": 0.5, "high": 0.5}


def test_the_interval_holds_what_changes_between_groups():
    groups = [
        {"linear": {"tokens": 100, "seconds": 1.0}, "15": {"tokens": 100, "seconds": 1.0 / speed}}
        for speed in (0.8, 1.0, 1.1, 1.2, 1.4)
    ]
    found = headline_figures.interval(groups, "15")
    assert 0.8 <= found["low"] < found["ratio"] < found["high"] <= 1.4


def test_four_prompts_give_no_interval_as_in_reports():
    groups = [{"linear": {"tokens": 100, "seconds": 1.0}, "15": {"tokens": 100, "seconds": 0.5}}] * 4
    assert headline_figures.interval(groups, "15") == {"ratio": 2.0, "low": None, "high": None}
    assert headline_figures.interval([*groups, groups[0]], "15") == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert headline_figures.LEAST_GROUPS == MIN_PROMPTS


def test_a_group_that_not_every_way_was_asked_is_left_out():
    rows = [
        {"group": number, "way": way, "tokens": 100, "seconds": 1.0, "steps": 25}
        for number in range(3)
        for way in ("linear", "15")
    ]
    assert headline_figures.throughput_figures(rows[:-1])["groups"] == 2


def test_another_budget_of_the_arm_beside_is_no_budget_of_the_trees():
    rates = {"linear": 10, "snapshot-15": 40, "31": 20, "auto": 30}
    rows = [
        {"group": number, "way": way, "tokens": 100, "seconds": 100 / rate, "steps": 25}
        for number in range(6)
        for way, rate in rates.items()
    ]
    found = headline_figures.throughput_figures(rows)
    assert found["best"]["budget"] == found["auto"]["budget"] == 31
    assert found["auto"]["ratio"] == 1.5
    assert found["ratio"]["snapshot-15"]["ratio"] == 4.0


def test_stages_are_those_between_two_looks():
    before = {"32": {"sampled_steps": 10, "stage_seconds": {"draft": 0.010}}, "64": {"sampled_steps": 5}}
    after = {
        "32": {"sampled_steps": 30, "stage_seconds": {"draft": 0.004, "verify": 0.020}},
        "64": {"sampled_steps": 5, "stage_seconds": {"draft": 0.009}},
        "128": {"sampled_steps": 0, "stage_seconds": {}},
    }
    found = headline_figures.stage_figures(before, after)
    assert set(found) == {"32"}
    assert found["32"]["steps"] == 20
    # (30 * 4 ms - 10 * 10 ms) / 20; a stage that was not there before counts from nothing.
    assert abs(found["32"]["draft"] - 1.0) < 1e-9
    assert abs(found["32"]["verify"] - 30.0) < 1e-9


def test_what_was_alone_is_held_against_other_turns_of_the_same_prompts():
    def rows(groups, **seconds):
        return [
            {"group": number, "way": way, "tokens": 100, "seconds": value, "steps": 25}
            for number in range(groups)
            for way, value in seconds.items()
        ]

    results = {
        "dflash-alone": {"about": {}, "in-flight-4": rows(8, linear=1.0), "in-flight-8": rows(6, linear=2.0)},
        "dflash": {"about": {}, "in-flight-4": rows(8, linear=1.1, **{"31": 0.5})},
        "chain": {"about": {}, "in-flight-8": rows(6, linear=3.0, **{"15": 1.0, "auto": 1.25})},
    }
    found = headline_figures.figures_of(results)["dflash-alone"]
    assert abs(found["same-again-4"]["ratio"] - 1.1) < 1e-9
    assert found["trees-8"]["groups"] == 6
    assert found["trees-8"]["ratio"]["15"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert found["trees-8"]["ratio"]["auto"]["ratio"] == 1.6
    assert "trees-4" not in found
