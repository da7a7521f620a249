"""What the summary makes of sections that the committed runs have not: on rows whose figures are known."""

from __future__ import annotations

import copy
import json
import lzma
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import headline_summary
from engine.headline_sections import SECTIONS

FOLDER = Path(__file__).parents[3] / "results" / "h200-27b"


@pytest.fixture(scope="module")
def committed():
    return headline_summary.load(FOLDER / "raw" / "main")


@pytest.fixture
def folder(tmp_path, committed):
    write(tmp_path, "main", committed)
    return tmp_path


def write(folder, run, results):
    raw = folder / "raw" / run
    raw.mkdir(parents=True)
    for arm, workloads in results.items():
        for workload, value in workloads.items():
            text = json.dumps(value).encode()
            (raw / f"{arm}.{workload}.json.xz").write_bytes(lzma.compress(text, preset=0))


def later(committed, **arms):
    """A run after the committed one."""
    host = copy.deepcopy(committed["host"])
    host["facts"]["time"] += 1000
    return {"host": host | arms.pop("host", {}), **arms}


def rows(rates, groups=6):
    """Rows of throughput with these tokens a second by way."""
    return [
        {
            "group": group,
            "way": way,
            "seconds": 100 / rate,
            "tokens": 100,
            "steps": 25,
            "output_ids": [[1] * 100],
        }
        for group in range(groups)
        for way, rate in rates.items()
    ]


def target(found, name):
    return next(row for row in found["targets"] if row["id"] == name)


def test_a_later_run_replaces_the_sections_that_it_has_and_no_others(folder, committed):
    before = headline_summary.summary(folder)
    write(folder, "second", later(committed, dflash={"about": {}, "steps-4": [{"linear": 20.0, "31": 22.0}]}))
    found = headline_summary.summary(folder)
    assert found["figures"]["dflash"]["step_ratio_4"]["31"]["median"] == pytest.approx(1.1)
    assert found["headline"] == before["headline"]
    assert target(found, "ddtree-over-best-linear")["raw"] == "raw/main/dflash.in-flight-1.json.xz"
    assert set(before["not_run"]) - set(found["not_run"]) == {"dflash.steps-4"}


def test_every_section_without_an_answer_is_named(folder):
    found = headline_summary.summary(folder)
    ran = {"ar.steps", "ar.in-flight-1", "ar.differences"}
    ran |= {"dflash.steps", "dflash.in-flight-1", "dflash.differences"}
    assert set(found["not_run"]) == {section.name for section in SECTIONS} - ran


@pytest.mark.parametrize(("linear", "worst", "beats"), [(80, 0.95, "7"), (110, 95 / 110, "chain")])
def test_auto_is_held_against_the_best_arm_at_every_concurrency(linear, worst, beats, folder, committed):
    sixteen = rows({"linear": linear, "7": 100, "31": 60, "auto": 95}, groups=5)
    write(folder, "second", later(committed, chain={"about": {}, "in-flight-16": sixteen}))
    found = headline_summary.summary(folder)
    row = target(found, "auto-over-best-fixed")
    assert row["figure"] == found["auto_worst_ratio"] == pytest.approx(worst)
    assert f"best in hindsight {beats}, [0." in row["detail"]
    assert row["raw"] == "raw/second/chain.in-flight-16.json.xz"


def test_the_fastest_linear_arm_is_the_one_that_trees_gain_least_on(folder, committed):
    alone = rows({"linear": 100, "15": 104, "31": 103})
    write(folder, "second", later(committed, chain={"about": {}, "in-flight-1": alone}))
    found = headline_summary.summary(folder)
    headline = found["headline"]["ddtree_over_best_linear"]
    assert (headline["linear_arm"], headline["budget"]) == ("chain", 15)
    assert headline["ratio"] == pytest.approx(1.04)
    # Steps stay those over SGLang's own kernels.
    assert target(found, "step-q64-over-dflash")["figure"] == pytest.approx(1.082, abs=1e-3)


def test_over_plain_decoding_a_budget_counts_that_was_asked_beside_it(folder, committed):
    plain = later(committed, ar={"in-flight-1": rows({"linear": 30, "31": 60, "63": 90})})
    fifteen = {"about": {}, "in-flight-1": rows({"linear": 100, "15": 104, "31": 103})}
    write(folder, "second", plain | {"chain": fifteen})
    over = headline_summary.summary(folder)["headline"]["ddtree_over_ar"]
    assert over["budget"] == 63
    assert [over[key] for key in ("ratio", "low", "high")] == pytest.approx([3, 3, 3])


def test_the_hosts_gap_is_that_of_the_budget_where_it_is_largest(folder, committed):
    trace = {"span": 1000, "busy": 900, "gaps": [20], "kernels": {"k": [1, 900]}}
    traces = {"linear": trace | {"gaps": [90]}, "31": trace, "63": trace | {"gaps": [20, 15]}}
    write(folder, "second", later(committed, dflash={"about": {}, "traces": traces}))
    row = target(headline_summary.summary(folder), "host-gap")
    assert row["figure"] == pytest.approx(0.035)
    assert row["raw"] == "raw/second/dflash.traces.json.xz"


@pytest.mark.parametrize(("budget", "figure"), [("63", 66.0), ("31", None)])
def test_memory_counts_once_eight_requests_of_64_nodes_were_in_flight(budget, figure, folder, committed):
    memory = [
        {"when": "ar and ddtree ready", "used_mib": ["130000"]},
        {"when": "ddtree alone", "used_mib": ["67584"]},
        {"when": "ddtree-fp8 alone", "used_mib": ["70000"]},
    ]
    chain = {"about": {}, "in-flight-8": rows({"linear": 10, budget: 8}, groups=5)}
    write(folder, "second", later(committed, host={"memory": memory}, chain=chain))
    row = target(headline_summary.summary(folder), "memory-n8-q64")
    assert row["figure"] == figure
    assert (row["raw"] is None) == (figure is None)
