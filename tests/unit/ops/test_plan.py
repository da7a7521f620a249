from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.dataset import Dataset, Prompt
from ddtree_ops.bench.interleave import prompt_rounds, rotated
from ddtree_ops.bench.plan import Plan, eta_seconds, make_plan
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.sweep import Sweep
from ddtree_ops.services.argv import Models, local_services
from ddtree_ops.services.base import Identity, ServiceSpec
from tests.support.ops import cell_spec


def dataset(sha: str = "d") -> Dataset:
    return Dataset("x", (Prompt("a", text="x"), Prompt("b", text="y")), sha)


def plan(
    sweep: dict[str, Any], *, models: Any = None, version: str = "1", host: str = "h", sha: str = "d"
) -> Plan:
    parsed = Sweep.model_validate(sweep)
    models = models or Models(Path("/t"), Path("/d"), "t", "d")
    return make_plan(parsed, dataset(sha), local_services(parsed, models, version), host_fingerprint=host)


BASE: dict[str, Any] = {"arms": ["ar", "dflash", "ddtree"], "budgets": [7, 31]}


def keys(*args: Any, **kwargs: Any) -> dict[str, str]:
    return {cell.name: cell.key for cell in plan(*args, **kwargs).cells}


def test_the_grid_has_a_cell_for_each_budget_of_arms_with_trees() -> None:
    made = plan({**BASE, "concurrencies": [1, 4], "temperatures": [0, 0.7]})
    assert [block.concurrency for block in made.blocks] == [1, 1, 4, 4]
    assert [cell.name for cell in made.blocks[0].cells] == ["ar", "dflash", "ddtree 7", "ddtree 31"]
    assert len({cell.key for cell in made.cells}) == 16
    assert [service.name for service in made.services] == ["ar", "dflash", "ddtree"]


def test_two_builders_of_one_arm_have_services_and_names_of_their_own() -> None:
    made = plan({"arms": ["ddtree", {"arm": "ddtree", "builder": "spine-first"}], "budgets": [7]})
    assert [cell.name for cell in made.cells] == ["ddtree 7", "ddtree 7 spine-first"]
    assert [cell.service.name for cell in made.cells] == ["ddtree", "ddtree-spine-first"]
    assert made.cells[1].spec.builder is Builder.SPINE_FIRST


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 64},
        {"seed": 1},
        {"repeats": 2},
        {"warmup": 2},
        {"ignore_eos": False},
        {"engine": {"kind": "local", "dtype": "bfloat16"}},
        {"engine": {"kind": "local", "threads": 2}},
        {"engine": {"kind": "local", "replicas": 2}},
        {"engine": {"kind": "local", "command": ["other"]}},
    ],
)
def test_whatever_could_change_a_number_changes_every_key(change: dict[str, Any]) -> None:
    before, after = keys(BASE), keys({**BASE, **change})
    assert all(before[name] != after[name] for name in before)


def test_models_dataset_engine_and_host_change_the_key() -> None:
    before = keys(BASE)
    other_target = Models(Path("/t"), Path("/d"), "T", "d")
    other_drafter = Models(Path("/t"), Path("/d"), "t", "D")
    for changed in (
        keys(BASE, models=other_target),
        keys(BASE, version="2"),
        keys(BASE, host="i"),
        keys(BASE, sha="e"),
    ):
        assert all(before[name] != changed[name] for name in before)
    drafted = keys(BASE, models=other_drafter)
    assert drafted["ar"] == before["ar"]
    assert drafted["dflash"] != before["dflash"]


def test_paths_names_and_other_budgets_leave_the_key_alone() -> None:
    before = keys(BASE)
    moved = keys(BASE, models=Models(Path("/elsewhere"), Path("/there"), "t", "d"))
    more = keys({**BASE, "name": "other", "budgets": [7, 31, 63], "request_timeout_s": 5})
    assert moved == before
    assert before.items() <= more.items()


def test_topk_changes_only_what_has_trees() -> None:
    before, after = keys(BASE), keys({**BASE, "engine": {"kind": "local", "topk": 8}})
    assert before["dflash"] == after["dflash"]
    assert before["ddtree 7"] != after["ddtree 7"]


def test_a_calibration_counts_by_its_content(tmp_path: Path) -> None:
    def made(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        engine = {"kind": "local", "builder": "calibrated", "calibration": str(tmp_path / name)}
        return keys({**BASE, "engine": engine})["ddtree 7 calibrated"]

    assert made("a.json", "1") == made("b.json", "1")
    assert made("a.json", "1") != made("a.json", "2")
    with pytest.raises(BadInput, match=r"none\.json cannot be read"):
        keys({**BASE, "engine": {"kind": "local", "builder": "calibrated", "calibration": "none.json"}})


def test_the_key_is_the_same_for_the_same_content_whatever_the_order() -> None:
    assert cell_spec().key() == cell_spec(argv=["--arm", "ddtree"]).key()
    assert cell_spec().key() != cell_spec(argv=["ddtree", "--arm"]).key()


def service(arm: Arm, budget: int | None) -> ServiceSpec:
    identity = Identity("sglang", "1", "m", None, "bfloat16", 16, Builder.BEST_FIRST, ())
    return ServiceSpec(f"{arm}-{budget}", arm, budget, identity, url="http://h:1")


def test_a_budget_without_a_service_is_refused() -> None:
    sweep = Sweep.model_validate(
        {
            "engine": {"kind": "external", "services": [{"arm": "ddtree", "budget": 7, "url": "http://h:1"}]},
            "arms": ["ddtree"],
            "budgets": [7, 31],
        }
    )
    with pytest.raises(BadInput, match="no service for ddtree with budget 31"):
        make_plan(sweep, dataset(), [service(Arm.DDTREE, 7)], host_fingerprint="h")


def test_the_eta_counts_what_is_not_sealed() -> None:
    made = plan({**BASE, "max_tokens": 100, "warmup": 0})
    speeds = dict.fromkeys(Arm, 0.01)
    assert eta_seconds(made, {}, speeds, start_s=0) == pytest.approx(4 * 2 * 100 * 0.01)
    sealed = {made.cells[0].key: None}
    assert eta_seconds(made, sealed, speeds, start_s=0) == pytest.approx(3 * 2 * 100 * 0.01)
    assert eta_seconds(made, {}, {Arm.AR: 0.01}) is None
    assert eta_seconds(made, {cell.key: None for cell in made.cells}, speeds) == 0


def test_every_arm_goes_first_equally_often() -> None:
    cells = ["a", "b", "c"]
    first = [rotated(cells, round_)[0] for round_, _, _ in prompt_rounds(6, range(1))]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]
    assert rotated([], 3) == []
    assert list(prompt_rounds(2, range(2))) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert list(prompt_rounds(2, range(1, 2))) == [(2, 1, 0), (3, 1, 1)]


def test_replicas_share_a_cell_take_no_longer_and_send_more() -> None:
    alone, both = plan(BASE), plan({**BASE, "engine": {"kind": "local", "replicas": 2}})
    assert [cell.name for cell in both.cells] == [cell.name for cell in alone.cells]
    assert [(one.name, one.number, one.label) for one in both.services[:2]] == [
        ("ar", 0, "ar"),
        ("ar", 1, "ar-1"),
    ]
    assert [cell.requests for cell in both.cells] == [2 * cell.requests for cell in alone.cells]
    speeds = dict.fromkeys(Arm, 0.01)
    assert eta_seconds(both, {}, speeds) == eta_seconds(alone, {}, speeds)
    assert alone.cells[0].spec.replicas is None


def test_side_by_side_a_load_point_takes_as_long_as_its_slowest_cell() -> None:
    one_budget = {**BASE, "budgets": [7]}
    turns, together = plan(one_budget), plan({**one_budget, "side_by_side": True})
    speeds = {Arm.AR: 0.1, Arm.DFLASH: 0.02, Arm.DDTREE: 0.01}
    slowest = eta_seconds(plan({**one_budget, "arms": ["ar"]}), {}, speeds)
    assert eta_seconds(together, {}, speeds) == slowest
    assert (eta_seconds(turns, {}, speeds) or 0) > (slowest or 0)
    assert together.cells[0].spec.beside == ["1 x ddtree 7", "1 x dflash"]
    assert not {cell.key for cell in turns.cells} & {cell.key for cell in together.cells}
    alone = {**one_budget, "arms": ["ar"]}
    assert keys({**alone, "side_by_side": True}) == keys(alone)
