"""The committed answers of the 27B-cost run as a results store that the report reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ddtree_ops.compare.analysis import analyse
from ddtree_ops.compare.load import load_results
from ddtree_ops.compare.report import render
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import ParityClass

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import headline_store
from headline_summary import newest

FOLDER = Path(__file__).parents[3] / "results" / "h200-27b"
FIGURES = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))["figures"]


@pytest.fixture(scope="module", params=["dflash", "ar"])
def linear(request):
    return request.param


@pytest.fixture(scope="module")
def cells(linear, tmp_path_factory):
    root = tmp_path_factory.mktemp("results") / "store"
    headline_store.write_store(newest(FOLDER / "raw"), linear, root)
    return {(cell.spec.arm, cell.spec.budget): cell for cell in load_results(root).cells}


def test_every_arm_and_budget_is_a_cell_of_the_same_prompts(linear, cells):
    assert set(cells) == {(Arm(linear), None), *((Arm.DDTREE, b) for b in (15, 31, 63))}
    prompts = {tuple(sorted(row.prompt_id for row in cell.rows)) for cell in cells.values()}
    assert len(prompts) == 1


def test_the_rows_give_the_summarys_accept_lengths_and_speeds(linear, cells):
    found = FIGURES[linear]["in-flight-1"]
    rate = {}
    for key, label in (((Arm(linear), None), "linear"), *(((Arm.DDTREE, b), str(b)) for b in (15, 31, 63))):
        rows = cells[key].rows
        tokens = sum(row.completion_tokens for row in rows)
        if label in found["accept_length"]:
            steps = sum(row.verify_steps for row in rows)
            assert tokens / steps == pytest.approx(found["accept_length"][label])
        rate[label] = tokens / sum(row.e2e_s for row in rows)
        if label != "linear":
            assert rate[label] / rate["linear"] == pytest.approx(found["ratio"][label]["ratio"])


def test_differences_from_plain_decoding_are_near_ties_and_the_unasked_are_unknown(linear, cells):
    (parity,) = cells[Arm.DDTREE, 31].record.parity
    asked = FIGURES["ar"]["differences"]["by_way"]["31"]
    assert (parity.identical, parity.near_tie) == (asked["equal"], asked["near_ties"])
    assert parity.different == 0
    assert parity.unknown == FIGURES[linear]["in-flight-1"]["groups"] - asked["answers"]
    assert all(finding.parity is ParityClass.NEAR_TIE for finding in parity.findings)
    assert all(finding.gap <= finding.threshold for finding in parity.findings)


def test_an_answer_is_judged_by_what_the_target_said_of_its_own_tokens(tmp_path):
    """Another token there, or another place, is not what the target was asked about: unknown, not near."""
    results = newest(FOLDER / "raw")
    judged = next(row for row in results["ar"]["differences"] if row["place"] is not None)
    group, place = judged["group"], judged["place"]
    for found in results["dflash"]["in-flight-1"]:
        if found["group"] == group and found["way"] == "31":
            found["output_ids"] = [[*found["output_ids"][0][:place], 4000, 1]]
    headline_store.write_store(results, "dflash", tmp_path / "store")
    cells = {(cell.spec.arm, cell.spec.budget): cell for cell in load_results(tmp_path / "store").cells}
    (changed,) = cells[Arm.DDTREE, 31].record.parity
    (kept,) = cells[Arm.DDTREE, 63].record.parity
    assert (changed.near_tie, changed.different, changed.unknown) == (kept.near_tie - 1, 0, kept.unknown + 1)
    (finding,) = [one for one in changed.findings if one.parity is ParityClass.UNKNOWN]
    assert (finding.first_difference, finding.token, finding.gap) == (place, 4000, None)


def test_warm_answers_are_cells_of_their_own_and_long_prompts_are_not_mixed_in(tmp_path):
    results = newest(FOLDER / "raw")
    cold = results["dflash"]["in-flight-1"]
    results["dflash"] |= {"in-flight-1-t0.7": cold[:15], "in-flight-1-8k": cold, "in-flight-16": cold}
    headline_store.write_store(results, "dflash", tmp_path / "store")
    cells = load_results(tmp_path / "store").cells
    assert sorted({cell.spec.temperature for cell in cells}) == [0, 0.7]
    warm = [cell for cell in cells if cell.spec.temperature]
    assert sum(len(cell.rows) for cell in warm) == sum(row["way"] != "auto" for row in cold[:15])
    assert all(cell.record.parity == [] for cell in warm)
    assert sum(len(cell.rows) for cell in cells if not cell.spec.temperature) == 4 * 29


def test_the_report_says_whose_answers_these_are_and_how_to_make_them_again(tmp_path):
    headline_store.write_store(headline_store.answers(FOLDER / "raw", "dflash"), "dflash", tmp_path / "store")
    page = render(analyse(tmp_path / "store"))
    assert headline_store.WHOSE.replace("'", "&#39;") in page
    assert "python3 tools/gpu/headline_plan.py --against dflash,ar" in page
    assert "headline_store.py results/h200-27b STORE --beside dflash" in page
    assert "NVIDIA H200, clocks.max.sm 1980 MHz" in page
    for wrong in ("bench sweep", "sweep.yaml", "not a git checkout", "not finished", "Gates of every cell"):
        assert wrong not in page
    assert "<dt>processor</dt>" not in page
    assert "Request latency" not in page
