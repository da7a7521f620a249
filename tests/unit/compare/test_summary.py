"""summary.json: the promised shape, and checks that can fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.compare.summary import build_summary
from tests.support.make_store import make_store


def cell(summary: dict[str, Any], arm: str, budget: int | None = None) -> dict[str, Any]:
    found: list[dict[str, Any]] = [c for c in summary["cells"] if (c["arm"], c["budget"]) == (arm, budget)]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def mixed(store: Path) -> dict[str, Any]:
    return build_summary(store)


def test_the_summary_is_json_of_the_promised_shape(mixed: dict[str, Any]) -> None:
    read = json.loads(json.dumps(mixed, allow_nan=False))
    assert read["schema"] == 1
    assert read["seconds"] > 0
    assert len(read["cells"]) == 11
    for item in read["cells"]:
        assert {
            "arm",
            "budget",
            "accept_length",
            "tokens_per_second",
            "verify_steps",
            "completion_tokens",
        } <= set(item)
        assert {"mean", "low", "high"} <= set(item["accept_length"])
        assert {"identical", "near_tie", "different"} <= set(item["parity"])
        assert {"steps_below_spine", "loops", "empty"} <= set(item["gates"])
    assert read["environment"]["cores"] == 2


def test_accept_length_is_completion_tokens_over_verify_steps(mixed: dict[str, Any]) -> None:
    tree = cell(mixed, "ddtree", 63)
    assert tree["accept_length"]["mean"] == pytest.approx(tree["completion_tokens"] / tree["verify_steps"])
    assert tree["accept_length"]["low"] < tree["accept_length"]["mean"] < tree["accept_length"]["high"]


def test_requests_that_broke_off_count_in_no_figure(mixed: dict[str, Any]) -> None:
    shadow = cell(mixed, "shadow", 15)
    assert shadow["completion_tokens"] == 15 * 96
    assert shadow["accept_length"]["mean"] == pytest.approx(15 * 96 / shadow["verify_steps"])
    assert shadow["tokens_per_second"] == pytest.approx(
        cell(mixed, "shadow", 7)["tokens_per_second"], rel=0.2
    )


def test_tree_kernels_that_never_ran_fail_their_check(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), idle_kernels=[("ddtree", 31)])
    assert build_summary(path)["checks"]["tree_kernels_ran"] is False


def test_ar_yields_one_token_per_pass_by_definition(mixed: dict[str, Any]) -> None:
    assert cell(mixed, "ar")["accept_length"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "prompts": 10}
    assert cell(mixed, "ar")["verify_steps"] is None


def test_shadows_estimate_is_kept_apart_from_what_it_accepted(mixed: dict[str, Any]) -> None:
    shadow = cell(mixed, "shadow", 63)
    assert shadow["shadow_estimate"]["mean"] > shadow["accept_length"]["mean"]
    assert shadow["accept_length"] == cell(mixed, "dflash")["accept_length"]
    assert cell(mixed, "ddtree", 63)["shadow_estimate"] is None


def test_a_sound_run_passes_every_check(clean_store: Path) -> None:
    checks = build_summary(clean_store)["checks"]
    assert [name for name, value in checks.items() if value is False] == []
    assert checks["shadow_equals_dflash"] is True
    assert checks["ddtree_equals_ar"] is True
    assert checks["unsafe_fails_parity"] is True
    assert checks["tree_kernels_ran"] is True
    assert checks["ddtree_near_ties"] == 0
    assert checks["ddtree63_over_dflash"]["low"] > 1


def test_what_a_run_can_not_show_is_null_and_not_true(tmp_path: Path) -> None:
    checks = build_summary(make_store(tmp_path / "s", arms=("ar", "dflash"), prompts=5))["checks"]
    assert checks["shadow_equals_dflash"] is None
    assert checks["ddtree_equals_ar"] is None
    assert checks["unsafe_fails_parity"] is None
    assert checks["tree_kernels_ran"] is None
    assert checks["ddtree63_over_dflash"] is None


def test_a_wrong_tree_output_fails_its_check_and_is_in_the_headline(tmp_path: Path) -> None:
    summary = build_summary(make_store(tmp_path / "s", different={("ddtree", 31): 1}))
    assert summary["checks"]["ddtree_equals_ar"] is False
    assert "ddtree_equals_ar" in summary["headline"]


def test_prompts_that_ar_was_not_asked_leave_the_claims_open(tmp_path: Path) -> None:
    """Neither equal nor different: no check is true, none fails, and the headline says why none is won."""
    unasked = dict.fromkeys([("dflash", None), ("ddtree", 15), ("ddtree", 31)], 6)
    plan = {"arms": ("ar", "dflash", "ddtree"), "budgets": (15, 31)}
    summary = build_summary(make_store(tmp_path / "s", **plan, unasked=unasked))
    assert summary["checks"]["ddtree_equals_ar"] is None
    assert summary["checks"]["dflash_equals_ar"] is None
    assert cell(summary, "ddtree", 31)["parity"]["unknown"] == 6
    assert summary["headline"] == (
        "No verdict on ddtree against dflash: ddtree 15, ddtree 31: "
        "not compared with ar on 6 of 10 prompts (ar was not asked)."
    )


def test_one_wrong_prompt_fails_the_claim_however_few_were_compared(tmp_path: Path) -> None:
    arms, wrong = ("ar", "dflash", "ddtree"), ("ddtree", 31)
    path = make_store(tmp_path / "s", arms=arms, budgets=(31,), unasked={wrong: 6}, different={wrong: 1})
    summary = build_summary(path)
    assert summary["checks"]["ddtree_equals_ar"] is False
    assert "output differs from ar on 1 of 10 prompts; not compared with ar on 6 of 10" in summary["headline"]


def test_answers_above_temperature_0_take_no_claim_back(tmp_path: Path) -> None:
    arms = ("ar", "dflash", "ddtree")
    both = build_summary(make_store(tmp_path / "a", arms=arms, temperatures=(0.0, 0.7), budgets=(31,)))
    assert both["checks"]["ddtree_equals_ar"] is True
    warm = build_summary(make_store(tmp_path / "b", arms=arms, temperatures=(0.7,), budgets=(31,)))
    assert warm["checks"]["ddtree_equals_ar"] is None
    assert warm["checks"]["shadow_equals_dflash"] is None


def test_a_run_without_dflash_gives_every_tree_against_plain_decoding(tmp_path: Path) -> None:
    plan = {"arms": ("ar", "ddtree"), "budgets": (15, 31), "engine": "sglang"}
    said = build_summary(make_store(tmp_path / "a", **plan))["headline"]
    assert re.match(
        r"Against plain decoding, tokens per second: ddtree 15 \d\.\d\d \[.*\] times ar \(faster\); "
        r"ddtree 31 \d\.\d\d \[.*\] times ar \(faster\)\. No dflash in this run\.$",
        said,
    )
    unasked = dict.fromkeys([("ddtree", 15), ("ddtree", 31)], 6)
    said = build_summary(make_store(tmp_path / "b", **plan, unasked=unasked))["headline"]
    assert said == (
        "No verdict on ddtree against ar, and no dflash in this run: "
        "ddtree 15, ddtree 31: not compared with ar on 6 of 10 prompts (ar was not asked)."
    )


def test_leaking_output_that_nobody_compared_is_not_called_caught(tmp_path: Path) -> None:
    plan = {"arms": ("ar", "dflash", "ddtree", "unsafe"), "budgets": (31,), "unasked": {("unsafe", 31): 10}}
    assert build_summary(make_store(tmp_path / "s", **plan))["checks"]["unsafe_fails_parity"] is None


def test_a_shadow_output_that_differs_from_dflash_fails_its_check(tmp_path: Path) -> None:
    summary = build_summary(make_store(tmp_path / "s", near_ties={("shadow", 7): 1}))
    assert summary["checks"]["shadow_equals_dflash"] is False


def test_near_ties_are_counted(mixed: dict[str, Any]) -> None:
    assert mixed["checks"]["ddtree_near_ties"] == 1
    assert mixed["checks"]["ddtree_equals_ar"] is True
    assert cell(mixed, "ddtree", 63)["parity"]["near_tie"] == 1


def test_spine_first_without_steps_below_the_spine_passes(tmp_path: Path) -> None:
    arms = ("ar", "dflash", "ddtree")
    spine = build_summary(make_store(tmp_path / "a", arms=arms, builder="spine-first"))
    assert spine["checks"]["spine_first_steps_below_spine_zero"] is True
    best = build_summary(make_store(tmp_path / "b", arms=arms))
    assert best["checks"]["spine_first_steps_below_spine_zero"] is None
    assert cell(best, "ddtree", 63)["gates"]["steps_below_spine"] > 0


@pytest.mark.parametrize(("budget", "holds"), [(7, True), (15, False)])
def test_only_a_tree_that_can_hold_its_spine_is_judged_by_it(
    tmp_path: Path, budget: int, holds: bool
) -> None:
    plan = {"arms": ("ar", "dflash", "ddtree"), "builder": "spine-first", "budgets": (7, 15)}
    summary = build_summary(make_store(tmp_path / "s", **plan, below_spine=[("ddtree", budget)]))
    assert cell(summary, "ddtree", budget)["gates"]["steps_below_spine"] > 0
    assert summary["checks"]["spine_first_steps_below_spine_zero"] is holds


def test_failed_and_missing_cells_are_not_complete(mixed: dict[str, Any], tmp_path: Path) -> None:
    assert mixed["checks"]["all_cells_complete"] is False
    assert cell(mixed, "shadow", 15)["gates"]["failed_requests"] == 5
    part = build_summary(make_store(tmp_path / "s", arms=("ar", "dflash"), unsealed=[("ar", None)]))
    assert part["checks"]["all_cells_complete"] is False
    assert part["missing_cells"] == 1


def test_the_note_about_cpu_speed_is_for_the_cpu_engine_only(mixed: dict[str, Any], tmp_path: Path) -> None:
    assert "not the point" in mixed["note"]
    gpu = build_summary(make_store(tmp_path / "s", engine="sglang", arms=("ar", "dflash", "ddtree")))
    assert gpu["note"] is None
    assert "tokens per second" in gpu["headline"].split(".")[0] + gpu["headline"].split(".")[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gain": 2.0, "prompts": 12}, "The tree yields"),
        ({"gain": -0.6, "prompts": 12}, "Even the best tree yields fewer tokens per target pass"),
        ({"arms": ("ar", "dflash")}, "does not compare ddtree with dflash"),
        (
            {"invalid": {("dflash", None): "throttled"}},
            "No verdict on ddtree against dflash: dflash is invalid: throttled",
        ),
        ({"gain": 0.0, "prompts": 4}, "can't be told"),
    ],
)
def test_the_headline_says_win_loss_or_cant_tell(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    arms = {"arms": ("ar", "dflash", "ddtree")} | changes
    assert words in build_summary(make_store(tmp_path / "s", **arms))["headline"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gain": 2.0, "prompts": 12}, "Against plain decoding: "),
        ({"gain": 2.0, "node_ms": 4.0, "prompts": 12}, "Plain decoding is faster: the tree yields 0."),
        ({"gain": 2.0, "prompts": 12, "arms": ("dflash", "ddtree")}, None),
    ],
)
def test_a_tree_that_beats_the_chain_is_held_against_plain_decoding_too(
    tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    arms = {"arms": ("ar", "dflash", "ddtree")} | changes
    found = build_summary(make_store(tmp_path / "s", **arms))["headline"]
    assert (words in found) if words else ("lain decoding" not in found)
