"""Projections follow from measurements and the assumptions that they name, and are labelled as such."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops.memory.planner import GIB, Verdict, Wanted, plan_memory
from ddtree_ops.memory.shapes import QWEN_3_6_27B, QWEN_3_6_27B_DFLASH
from ddtree_ops.schemas.arms import Arm

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import projections

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "results" / "h200-27b"
SUMMARY = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
PUBLISHED = json.loads(projections.CURVES.read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "h200-27b.md").read_text(encoding="utf-8")
STEPS = {
    "15": {"median": 1.0, "lowest": 0.99, "highest": 1.01},
    "31": {"median": 1.25, "lowest": 1.2, "highest": 1.5},
    "63": {"median": 2.0, "lowest": 2.0, "highest": 2.0},
}
MEASURED = 4.0e12


@pytest.fixture(scope="module")
def found():
    return projections.projections(SUMMARY["figures"])


def widths(**curve):
    whole = {"id": "x", "chain": None, "trees": {}, "caution": ""} | curve
    (made,) = projections.accept_curves({"curves": [whole]}, STEPS)["curves"]
    return made["widths"]


def test_a_width_takes_the_most_published_nodes_that_fit_and_never_more():
    made = widths(chain={"drafts": 15, "accept": 4.0}, trees={"16": 4.4, "30": 5.0, "32": 9.0})
    assert sorted(made) == ["32", "64"]
    assert (made["32"]["budget"], made["32"]["accept"]) == (30, 5.0)
    assert made["64"]["budget"] == 32


def test_tokens_a_second_are_the_accept_ratio_over_the_step_ratio():
    made = widths(chain={"drafts": 15, "accept": 4.0}, trees={"31": 5.0})["32"]
    assert made["accept_ratio"] == 1.25
    assert (made["low"], made["over_dflash"], made["high"]) == pytest.approx((1.25 / 1.5, 1.0, 1.25 / 1.2))


def test_without_a_published_chain_no_ratio_is_made_up():
    made = widths(trees={"31": 5.0})["32"]
    assert made == {"budget": 31, "accept": 5.0, "pays_below_chain": 4.0}


def test_every_curve_names_a_public_source():
    for curve in PUBLISHED["curves"]:
        assert PUBLISHED["sources"][curve["source"]].startswith("https://github.com/")
        assert curve["caution"]
        assert all(budget.isdigit() for budget in curve["trees"])


def step(**changes):
    return replace(projections.Step(20.0, kernels=(1.0, 2.0), there=(1.0, 2.0)), **changes)


def same_card(**changes):
    reached = MEASURED / projections.PRO_6000["bytes_per_second"]
    return replace(projections.Card(reached=reached, kernel=1.0, rest=1.0, low_kernels=True), **changes)


def test_on_a_card_like_the_measured_one_a_step_takes_what_was_measured():
    for low in (True, False):
        card = same_card(low_kernels=low)
        assert projections.milliseconds(step(), card, MEASURED, "bfloat16") == pytest.approx(20.0)


def test_each_part_scales_with_its_own_assumption():
    plain = projections.milliseconds(step(), same_card(), MEASURED, "bfloat16")
    reading = 1e3 * projections.bytes_of(step(), "bfloat16") / MEASURED
    half = same_card(reached=same_card().reached / 2)
    assert projections.milliseconds(step(), half, MEASURED, "bfloat16") == pytest.approx(plain + reading)
    slow = same_card(kernel=3.0)
    assert projections.milliseconds(step(), slow, MEASURED, "bfloat16") == pytest.approx(plain + 2 * 1.0)
    late = same_card(rest=2.0)
    rest = 20.0 - reading - 1.0
    assert projections.milliseconds(step(), late, MEASURED, "bfloat16") == pytest.approx(plain + rest)
    other = step(there=(1.5, 2.5))
    assert projections.milliseconds(other, same_card(), MEASURED, "bfloat16") == pytest.approx(plain + 0.5)


def test_fp8_halves_the_targets_layers_and_nothing_else():
    saved = projections.bytes_of(step(), "bfloat16") - projections.bytes_of(step(), "fp8")
    layers = QWEN_3_6_27B.parameters - 2 * QWEN_3_6_27B.vocab * QWEN_3_6_27B.hidden
    assert saved == pytest.approx(layers, rel=1e-3)
    drafter = projections.bytes_of(step(), "fp8") - projections.bytes_of(step(drafts=False), "fp8")
    head = 2 * QWEN_3_6_27B.vocab * QWEN_3_6_27B.hidden
    assert drafter == pytest.approx(QWEN_3_6_27B_DFLASH.weight_bytes(tp=1) + head, rel=0.01)


def test_the_parts_add_up_to_the_measured_step_whatever_was_not_timed(found):
    for name, parts in found["rtx_pro_6000"]["h200"]["steps"].items():
        for kernels, rest in zip(parts["kernels"], reversed(parts["rest"]), strict=True):
            assert parts["reading"] + kernels + rest == pytest.approx(parts["step"]), name
            assert rest > 0, name


def test_dflash_is_projected_without_the_kernel_whose_tiles_differ(found):
    measured = SUMMARY["figures"]["dflash"]["step_ms"]["linear"]
    without = found["rtx_pro_6000"]["h200"]["steps"]["dflash"]["step"]
    bench = json.loads((FOLDER.parent / "h200-kernels" / "bench.json").read_text(encoding="utf-8"))
    stock = bench["results"]["stock"]["verify-n1-q16"]["milliseconds"]
    assert measured - without == pytest.approx(stock)


def test_64_nodes_take_the_launches_that_the_other_card_runs():
    times = [
        {"batch": 1, "width": 64, "config": [32, 32, 64, 8], "milliseconds": 1.1},
        {"batch": 1, "width": 64, "config": None, "milliseconds": 1.4},
        {"batch": 4, "width": 64, "config": None, "milliseconds": 2.7},
    ]
    assert projections.three_launches(times, 64) == 1.4


def test_a_kernel_that_was_timed_for_eight_requests_only_is_a_range():
    eight = {"commit-n8": {"milliseconds": 0.8}}
    assert projections._of_one(eight, "commit") == (0.1, 0.8)
    assert projections._of_one(eight | {"commit-n1": {"milliseconds": 0.3}}, "commit") == (0.3, 0.3)


def test_a_ratio_moves_both_steps_by_the_same_assumption():
    assert projections._at_most(step(), step(), MEASURED, "bfloat16") == 1.0


def test_products_stay_below_reading_so_that_bandwidth_decides(found):
    fastest = min(row["low"] for row in found["rtx_pro_6000"]["step_ms"]["bfloat16"].values())
    assert all(0 < ms < fastest / 2 for ms in found["rtx_pro_6000"]["products_ms"].values())


def test_one_request_more_than_the_most_fits_no_share_of_the_card():
    wanted = Wanted(Arm.DDTREE, 63, 1, 32768, int(projections.PRO_6000["gib"] * GIB))
    most = projections.most_running(wanted, (Verdict.FITS,))

    def fits(running):
        plans = (replace(wanted, running=running, mem_fraction=p / 100) for p in range(80, 96))
        return any(
            plan_memory(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, plan).verdict is Verdict.FITS for plan in plans
        )

    assert most >= 8
    assert fits(most)
    assert not fits(most + 1)


def test_the_page_has_the_projected_tables_under_their_own_heading(found):
    _, _, section = PAGE.partition("## Projections: computed, not measured")
    section = section.partition("\n## ")[0]
    for name, text in projections.tables(found).items():
        assert projections.put(section, name, text) == section, "tools/gpu/projections.py --write makes them"
    assert found == SUMMARY["projections"]


def test_tables_go_between_their_marks_and_nowhere_else():
    marks = ["<!-- projected steps: begin -->", "old", "<!-- projected steps: end -->"]
    page = "\n".join(["before", *marks, "after"])
    assert projections.put(page, "steps", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="curves"):
        projections.put(page, "curves", "new")
