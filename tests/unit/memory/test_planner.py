"""The memory planner against published shapes, the engine's own log, and the small pair's files."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.cli import app
from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput
from ddtree_ops.memory.planner import (
    GIB,
    MIB,
    Plan,
    Verdict,
    Wanted,
    cluster_services,
    knobs,
    largest_budget,
    largest_running,
    plan_memory,
)
from ddtree_ops.memory.shapes import (
    QWEN_3_6_27B,
    QWEN_3_6_27B_DFLASH,
    drafter_shape,
    target_shape,
)
from ddtree_ops.schemas.arms import BUDGETS, Arm
from ddtree_ops.schemas.cluster import Cluster, Scratch
from ddtree_ops.schemas.publish import FOLDER

SMALL_TARGET: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SMALL_DRAFTER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 3, 5]},
}
CARD = int(95.6 * GIB)


def wanted(**changes: Any) -> Wanted:
    return replace(Wanted(Arm.DDTREE, 31, running=4, context=32768, card=CARD, mem_fraction=0.80), **changes)


def plan(**changes: Any) -> Plan:
    return plan_memory(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, wanted(**changes))


def size(found: Plan, part: str) -> int:
    return next(item.size for item in (*found.static, *found.reserve) if item.name == part)


def config(folder: Path, data: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(data))
    return str(folder)


def test_a_node_of_the_27b_takes_what_was_published() -> None:
    recurrent = QWEN_3_6_27B.recurrent
    assert recurrent.state_bytes(tp=1, element=4) == 144 * MIB
    assert recurrent.window_bytes(tp=1) == 2.8125 * MIB
    node = {
        element: recurrent.state_bytes(tp=1, element=element) + recurrent.window_bytes(tp=1)
        for element in (4, 2)
    }
    assert [round(node[element] / MIB, 1) for element in (4, 2)] == [146.8, 74.8]
    assert recurrent.state_bytes(tp=2, element=4) == 72 * MIB


def test_snapshots_of_16_nodes_for_4_requests_take_what_the_engine_logged() -> None:
    found = plan(budget=15, running=4, scratch=Scratch.SNAPSHOTS)
    assert size(found, "verify scratch: states") == 11.25 * GIB


def test_the_stash_of_64_nodes_takes_61_mib() -> None:
    one_row = size(plan(budget=63, running=1), "tree scratch: stash") / 2
    assert round(one_row / MIB) == 61


def test_weights_of_the_27b_are_counted() -> None:
    assert round(QWEN_3_6_27B.parameters / 1e9, 1) == 26.9
    assert round(size(plan(), "target weights") / 1e9) == 54
    fp8 = QWEN_3_6_27B.weight_bytes(tp=1, dtype="fp8")
    assert 0.53 < fp8 / QWEN_3_6_27B.weight_bytes(tp=1, dtype="bfloat16") < 0.56


def test_parameters_of_the_small_pair_are_those_in_its_files(tmp_path: Path) -> None:
    assert target_shape(config(tmp_path, SMALL_TARGET)).parameters == 10_528_304
    assert drafter_shape(config(tmp_path, SMALL_DRAFTER)).parameters == 2_558_720


def test_a_checkpoints_files_count_more_than_the_formula(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    shape = target_shape(config(tmp_path, SMALL_TARGET))
    assert shape.weight_bytes(tp=1, dtype="bfloat16") == 6
    assert shape.weight_bytes(tp=1, dtype="float32") == 4 * 10_528_304


def test_a_vision_tower_is_counted_from_its_config(tmp_path: Path) -> None:
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 5120}
    whole = config(
        tmp_path, {"text_config": SMALL_TARGET, "vision_config": tower, "tie_word_embeddings": True}
    )
    extra = target_shape(whole).weight_bytes(tp=1, dtype="bfloat16") - 2 * 10_528_304
    assert 0.4e9 < extra / 2 < 0.5e9


def test_kv_of_a_token_is_that_of_target_and_drafter() -> None:
    assert plan(arm=Arm.AR, budget=None).token_bytes == 16 * 2 * 4 * 256 * 2
    assert plan().token_bytes == 65536 + 5 * 2 * 8 * 128 * 2


def test_ranks_beyond_the_kv_heads_repeat_them() -> None:
    assert QWEN_3_6_27B.attention.kv_bytes(tp=4, element=2) == QWEN_3_6_27B.attention.kv_bytes(
        tp=8, element=2
    )


def test_state_slots_do_not_cap_the_running_requests() -> None:
    found = plan(running=6)
    assert found.state_slots == 30
    assert size(found, "recurrent states") == 31 * (144 * MIB + 2.8125 * MIB)


@pytest.mark.parametrize(
    ("arm", "budget", "parts"),
    [
        (Arm.AR, None, set()),
        (Arm.DFLASH, None, {"verify scratch: states", "verify scratch: conv"}),
        (Arm.SHADOW, 31, {"verify scratch: states", "verify scratch: conv"}),
        (Arm.DDTREE, 31, {"tree scratch: stash"}),
        (Arm.UNSAFE, 31, {"verify scratch: states", "verify scratch: conv"}),
    ],
)
def test_each_arm_has_its_own_scratch(arm: Arm, budget: int | None, parts: set[str]) -> None:
    assert {part.name for part in plan(arm=arm, budget=budget).static if "scratch" in part.name} == parts


def test_shadow_takes_exactly_what_the_chain_takes() -> None:
    shadow, chain = plan(arm=Arm.SHADOW), plan(arm=Arm.DFLASH, budget=None)
    assert (shadow.static, shadow.reserve) == (chain.static, chain.reserve)


def test_a_service_that_does_not_fit_is_refused_with_knobs_that_work() -> None:
    much = wanted(budget=63, running=8, scratch=Scratch.SNAPSHOTS)
    assert plan(budget=63, running=8, scratch=Scratch.SNAPSHOTS).verdict is Verdict.NO
    found = knobs(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, much)
    assert found[0] == "scratch: stash"
    assert "max_running_requests: 1" in found
    assert "budget: 7" in found
    fewer = replace(much, running=1)
    assert plan_memory(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, fewer).verdict is not Verdict.NO


def test_verdicts_follow_the_kv_that_is_left() -> None:
    few = plan(running=4)
    assert few.verdict is Verdict.FITS
    assert few.kv_tokens >= few.tokens_for_all
    many = plan(running=8)
    assert many.verdict is Verdict.TIGHT
    assert many.tokens_needed <= many.kv_tokens < many.tokens_for_all
    assert plan(context=1 << 20).verdict is Verdict.NO


def test_a_card_without_room_outside_the_pools_is_refused() -> None:
    found = plan(mem_fraction=0.97)
    assert found.verdict is Verdict.NO
    assert "outside the pools" in found.reason


def test_the_largest_budget_grows_with_the_card_and_shrinks_with_requests() -> None:
    def best(card: float, running: int) -> int:
        one = wanted(card=int(card * GIB), running=running, scratch=Scratch.SNAPSHOTS)
        return largest_budget(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, one) or 0

    assert best(79, 4) < best(95.6, 4) < best(141, 4)
    assert best(95.6, 1) >= best(95.6, 4) >= best(95.6, 8)
    assert best(40, 1) == 0


def test_the_most_running_requests_fit_and_one_more_does_not() -> None:
    one = wanted(budget=31, running=32, scratch=Scratch.SNAPSHOTS)
    most = largest_running(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, one)
    assert most is not None
    assert plan(running=most, scratch=Scratch.SNAPSHOTS).verdict is not Verdict.NO
    assert plan(running=most + 1, scratch=Scratch.SNAPSHOTS).verdict is Verdict.NO


def test_more_of_anything_never_needs_less() -> None:
    sizes = [sum(part.size for part in plan(budget=budget).static) for budget in BUDGETS]
    assert sizes == sorted(sizes)
    sizes = [sum(part.size for part in plan(running=running).static) for running in range(1, 9)]
    assert sizes == sorted(sizes)


def test_the_template_fits_on_the_card_that_it_names() -> None:
    cluster = load_config(FOLDER / "cluster.template.yaml", Cluster)
    for name, one in cluster_services(cluster, weights="bfloat16").items():
        assert plan_memory(QWEN_3_6_27B, QWEN_3_6_27B_DFLASH, one).verdict is Verdict.FITS, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"config\.json: hidden_size: found None, allowed: a whole number"),
        ({"num_experts": 128}, "with experts, allowed: a dense hybrid"),
        ({"linear_num_value_heads": None}, "linear_num_value_heads: found None"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        target_shape(config(tmp_path, SMALL_TARGET | change))


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    target = target_shape(config(tmp_path, SMALL_TARGET))
    with pytest.raises(BadInput, match="found 4, allowed: a divisor of the 2 attention heads"):
        plan_memory(target, QWEN_3_6_27B_DFLASH, wanted(tp=4))


@pytest.mark.parametrize("text", ["", "[]", '{"text_config": 3}', "{"])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput):
        target_shape(str(tmp_path))
    with pytest.raises(BadInput):
        drafter_shape(str(tmp_path))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = app.run(["plan", "memory", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_says_what_fits_and_exits_1_when_nothing_does(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run(capsys, "--running", "4")
    assert (code, answer["largest_budget"]) == (0, 127)
    code, answer = run(capsys, "--budget", "63", "--scratch", "snapshots", "--running", "8")
    assert code == 1
    assert answer["services"]["ddtree"]["knobs"][0] == "scratch: stash"


def test_the_command_plans_a_whole_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run(capsys, "--cluster", str(FOLDER / "cluster.template.yaml"))
    assert code == 0
    assert list(answer["services"]) == ["linear", "shadow", "tree"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "32"), "budget: found 32, allowed: 7, 15, 31, 63, 127"),
        (("--tp", "3"), "--tp: found 3, allowed: 1, 2, 4, 8"),
        (("--scratch", "x"), "--scratch: found 'x', allowed: stash, snapshots"),
        (("--model", "/nowhere"), "--drafter: found none, allowed: the drafter of --model"),
        (("--model", "/nowhere", "--arm", "ar"), "model: found '/nowhere', allowed: a checkpoint folder"),
    ],
)
def test_wrong_options_exit_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = run(capsys, *arguments)
    assert code == 2
    assert message in answer["message"]


def test_people_see_the_parts_and_the_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["plan", "memory", "--budget", "31", "--scratch", "snapshots"]) == 1
    text = capsys.readouterr().out
    assert "recurrent states" in text
    assert "to make it fit: scratch: stash; or" in text
    assert "does not fit: ddtree" in text
