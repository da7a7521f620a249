"""The committed answers of the 27B-cost run as a results store that the report reads."""

from __future__ import annotations

import html
import json
import shlex
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
RAW = newest(FOLDER / "raw")


def budgets(linear):
    """Those that were asked beside a linear arm, one request in flight."""
    return sorted({int(row["way"]) for row in RAW[linear]["in-flight-1"] if row["way"].isdigit()})


def cells_at(root, temperature=0.0):
    found = [cell for cell in load_results(root).cells if cell.spec.temperature == temperature]
    return {(cell.spec.arm, cell.spec.budget): cell for cell in found}


@pytest.fixture(scope="module", params=["dflash", "ar"])
def linear(request):
    return request.param


@pytest.fixture(scope="module")
def cells(linear, tmp_path_factory):
    root = tmp_path_factory.mktemp("results") / "store"
    headline_store.write_store(RAW, linear, root)
    return cells_at(root)


def test_every_arm_and_budget_is_a_cell_of_the_same_prompts(linear, cells):
    assert list(cells) == [(Arm(linear), None), *((Arm.DDTREE, budget) for budget in budgets(linear))]
    prompts = {tuple(sorted(row.prompt_id for row in cell.rows)) for cell in cells.values()}
    assert len(prompts) == 1


def test_the_rows_give_the_summarys_accept_lengths_and_speeds(linear, cells):
    found = FIGURES[linear]["in-flight-1"]
    rate = {}
    for key, label in (
        ((Arm(linear), None), "linear"),
        *(((Arm.DDTREE, budget), str(budget)) for budget in budgets(linear)),
    ):
        rows = cells[key].rows
        tokens = sum(row.completion_tokens for row in rows)
        if label in found["accept_length"]:
            steps = sum(row.verify_steps for row in rows)
            assert tokens / steps == pytest.approx(found["accept_length"][label])
        rate[label] = tokens / sum(row.e2e_s for row in rows)
        if label != "linear":
            assert rate[label] / rate["linear"] == pytest.approx(found["ratio"][label]["ratio"])


def test_answers_are_held_against_plain_decodings_and_the_unasked_are_unknown(linear, cells):
    truths = {
        row["group"]: row["output_ids"][0] for row in RAW["ar"]["in-flight-1"] if row["way"] == "linear"
    }
    for (arm, _), cell in cells.items():
        if arm is Arm.AR:
            assert cell.record.parity == []
            continue
        (parity,) = cell.record.parity
        asked = [row for row in cell.rows if row.prompt_index in truths]
        assert parity.identical == sum(row.output_ids == truths[row.prompt_index] for row in asked)
        assert len(parity.findings) == len(asked) - parity.identical
        told = [finding for finding in parity.findings if finding.parity is not ParityClass.UNKNOWN]
        assert parity.unknown == len(cell.rows) - parity.identical - len(told)
        for finding in told:
            near = finding.gap is not None and finding.gap <= finding.threshold
            assert (finding.parity is ParityClass.NEAR_TIE) == near


def test_an_answer_is_judged_by_what_the_target_said_of_its_own_tokens(tmp_path):
    """Another token there, or another place, is not what the target was asked about: unknown, not near."""
    judged = next(row for row in RAW["ar"]["differences"] if row["place"] is not None and row["way"] == "31")
    group, place = judged["group"], judged["place"]
    truth = next(
        row["output_ids"][0]
        for row in RAW["ar"]["in-flight-1"]
        if (row["group"], row["way"]) == (group, "linear")
    )

    def parity_with(tokens, name):
        rows = [
            {**row, "output_ids": [[*truth[:place], *tokens]]}
            if (row["group"], row["way"]) == (group, "31")
            else row
            for row in RAW["dflash"]["in-flight-1"]
        ]
        results = RAW | {"dflash": RAW["dflash"] | {"in-flight-1": rows}}
        headline_store.write_store(results, "dflash", tmp_path / name)
        (parity,) = cells_at(tmp_path / name)[Arm.DDTREE, 31].record.parity
        return parity, next(one for one in parity.findings if one.prompt_id == f"prompts-{group:02d}")

    known, finding = parity_with([judged["tokens"][1], 1], "known")
    assert finding.parity is not ParityClass.UNKNOWN
    changed, finding = parity_with([4000, 1], "changed")
    assert finding.parity is ParityClass.UNKNOWN
    assert (finding.first_difference, finding.token, finding.gap) == (place, 4000, None)
    assert changed.unknown == known.unknown + 1


def test_warm_answers_are_cells_of_their_own_and_long_prompts_are_not_mixed_in(tmp_path):
    cold = RAW["dflash"]["in-flight-1"]
    warm, long = cold[: len(cold) // 2], {"in-flight-1-8k": cold, "in-flight-16": cold}
    results = RAW | {"dflash": RAW["dflash"] | {"in-flight-1-t0.7": warm} | long}
    headline_store.write_store(results, "dflash", tmp_path / "store")
    for rows, temperature in ((cold, 0.0), (warm, 0.7)):
        found = cells_at(tmp_path / "store", temperature)
        assert sum(len(cell.rows) for cell in found.values()) == sum(row["way"] != "auto" for row in rows)
        assert all(bool(cell.record.parity) == (temperature == 0) for cell in found.values())


def test_the_report_says_whose_answers_these_are_and_how_to_make_them_again(tmp_path):
    results = headline_store.answers(FOLDER / "raw", "dflash")
    headline_store.write_store(results, "dflash", tmp_path / "store")
    page = render(analyse(tmp_path / "store"))
    assert headline_store.WHOSE.replace("'", "&#39;") in page
    argv = shlex.join(results["host"]["facts"]["argv"])
    assert (
        html.escape(f"python3 tools/gpu/headline_plan.py {argv}", quote=True).replace("&#x27;", "&#39;")
        in page
    )
    assert "headline_store.py results/h200-27b STORE --beside dflash" in page
    assert "NVIDIA H200, clocks.max.sm 1980 MHz" in page
    for wrong in ("bench sweep", "sweep.yaml", "not a git checkout", "not finished", "Gates of every cell"):
        assert wrong not in page
    assert f"GPUs: not sampled: {headline_store.NO_SAMPLES}." in page
    assert "<dt>processor</dt>" not in page
    assert "Request latency" not in page
