from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.config import load_sweep
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.sweep import LocalEngine


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("budgts: [7]", "budgts: Extra inputs are not permitted"),
        ("engine: {kind: local, thread: 2}", "engine.local.thread: Extra inputs"),
        ("arms: [dtree]", "arms.0.arm: Input should be 'ar', 'dflash', 'shadow', 'ddtree' or 'unsafe'"),
        ("arms: []", "arms: List should have at least 1 item"),
        ("arms: [ar, ar]", "an arm is named twice"),
        ("arms: [{arm: ddtree, builder: best-first}, ddtree]", "an arm is named twice"),
        ("arms: [unsafe]", "allow_hybrid_unsafe: true"),
        ("arms: [{arm: ar, budgets: [7]}]", "'ar' drafts no tree and takes no budgets"),
        ("arms: [{arm: dflash, builder: spine-first}]", "'dflash' drafts no tree and takes no builder"),
        ("budgets: [seven]", "budgets.0: Input should be a valid integer"),
        ("budgets: [8]", "budget 8 is not one of 7, 15, 31, 63, 127"),
        ("budgets: [255]", "budget 255 is not one of"),
        ("budgets: [7, 7]", "a budget is named twice"),
        ("arms: [{arm: ddtree, budgets: [500]}]", "budget 500 is not one of"),
        ("concurrencies: [0]", "concurrencies.0: Input should be greater than or equal to 1"),
        ("temperatures: [0, 0.0]", "temperatures: a value is named twice"),
        ("schema: 2", "schema: Input should be 1"),
        ("engine: {kind: docker}", "does not match any of the expected tags"),
        ("engine: {kind: local, builder: calibrated}", "needs a calibration file"),
        ("engine: {kind: external, services: [{arm: ar, url: nowhere}]}", "should be a valid URL"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_sweep(write(tmp_path, text), {})
    assert complaint in caught.value.message
    assert "sweep.yaml" in caught.value.message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("budgets: [7\nx", ":2: not YAML"),
        ("budgets: [7]\nbudgets: [15]", ":2: not YAML: key 'budgets' twice"),
        ("engine: {kind: local, topk: 8, topk: 16}", "key 'topk' twice"),
        ("- a", "found list, allowed: a mapping"),
    ],
)
def test_what_is_no_mapping_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_sweep(write(tmp_path, text), {})
    assert complaint in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.yaml cannot be read"):
        load_sweep(tmp_path / "none.yaml", {})


def test_options_go_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "engine: {kind: local, topk: 8}\narms: [ar, {arm: ddtree, budgets: [7]}]\nprompts: 3\n"
    )
    sweep = load_sweep(path, {"arms": ["ddtree"], "prompts": None, "engine": {"threads": 2, "topk": None}})
    assert [choice.arm for choice in sweep.arms] == [Arm.DDTREE]
    assert sweep.arms[0].budgets == [7]
    assert sweep.prompts == 3
    assert isinstance(sweep.engine, LocalEngine)
    assert (sweep.engine.topk, sweep.engine.threads) == (8, 2)
    assert load_sweep(path, {"arms": ["ddtree"], "budgets": [63]}).arms[0].budgets is None


def test_one_arm_may_run_with_two_builders(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, "arms: [ddtree, {arm: ddtree, builder: spine-first}]"), {})
    assert [choice.builder for choice in sweep.arms] == [None, Builder.SPINE_FIRST]


def test_paths_are_relative_to_the_file_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "drafter").mkdir()
    path = write(
        tmp_path, "dataset: prompts.jsonl\nengine: {kind: local, model: some/repo, drafter: drafter}"
    )
    sweep = load_sweep(path, {})
    assert isinstance(sweep.engine, LocalEngine)
    assert sweep.dataset == str(tmp_path / "prompts.jsonl")
    assert str(sweep.engine.model) == "some/repo"
    assert sweep.engine.drafter == tmp_path / "drafter"


@pytest.mark.parametrize("option", [{"topk": 4}, {"model": Path("x")}])
def test_local_options_do_not_fit_running_services(tmp_path: Path, option: dict[str, Any]) -> None:
    path = write(tmp_path, "engine: {kind: external, services: [{arm: ar, url: 'http://h:1'}]}\narms: [ar]")
    with pytest.raises(BadInput, match="uses running services"):
        load_sweep(path, {"engine": option})
