"""The committed answers of the 27B-cost run as a results store that the report reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ddtree_ops.compare.load import load_results
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
