"""Every gate, made to fail in every way it can, on findings that are put together by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.schemas.acceptance import GateId, GateResult, Verdict
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import GateStatus, Parity, RequestStatus
from ddtree_ops.services.counters import growth, totals_of
from ddtree_ops.verify import gates
from ddtree_ops.verify.measure import Findings, Load
from ddtree_ops.verify.subjects import Address, Subject, self_check_of
from tests.support.ops import request_row

CHECK: dict[str, Any] = {
    "trees": 2,
    "node_path_max_diff": 1e-5,
    "relative_to_range": 1e-6,
    "sibling_leak_max_diff": 0.0,
    "sibling_leak_relative": 0.0,
    "noise_max_diff": 1e-5,
    "dtype": "float32",
    "passed": True,
}


def subject(arm: Arm = Arm.DDTREE, check: dict[str, Any] | None = CHECK, **changes: Any) -> Subject:
    fields: dict[str, Any] = {
        "name": arm.value,
        "address": Address(arm, "http://127.0.0.1:1"),
        "info": {"ddtree": {"self_check": check}},
        "budget": None,
        "builder": Builder.BEST_FIRST,
        "per_request": True,
        "engine": "reference",
        "dtype": "float32",
        "block": 16,
    }
    return Subject(**{**fields, **changes})


def parity(reference: Arm = Arm.DFLASH, **counts: int) -> Parity:
    return Parity(
        reference=reference, **{"identical": 2, "near_tie": 0, "different": 0, "unknown": 0} | counts
    )


def findings(one: Subject, **changes: Any) -> Findings:
    rows = [request_row(index) for index in range(2)]
    load = Load([Prompt(f"p{index}", text="x") for index in range(2)], 8)
    fields: dict[str, Any] = {
        "rows": {one.name: rows},
        "spines": {one.name: rows},
        "parities": {one.name: [parity()]},
        "noise": {one.dtype: 1e-5},
    }
    return Findings([one], load, **{**fields, **changes})


def judged(one: Subject, **changes: Any) -> dict[GateId, GateResult]:
    return {gate.id: gate for gate in gates.judge(findings(one, **changes))}


def test_a_sound_service_passes_all_gates_without_a_remedy() -> None:
    found = judged(subject())
    assert list(found) == list(GateId)
    assert {gate.status for gate in found.values()} == {GateStatus.PASS}
    assert {gate.remedy for gate in found.values()} == {""}
    assert gates.verdict(list(found.values())) is Verdict.PASSED


def test_every_gate_has_a_title_and_a_remedy_of_one_line() -> None:
    assert list(gates.ROWS) == list(gates.CHECKS) == list(GateId)
    for row in gates.ROWS.values():
        assert row.title
        assert row.remedy
        assert "\n" not in row.remedy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"relative_to_range": 2e-4}, "differ by 0.0002 of the range"),
        ({"relative_to_range": None}, "not a number"),
        ({"trees": 0}, "no start-up self-check: none was run"),
        ({"passed": False}, "node and path"),
        ({"trees": None, "skipped": "no memory behind the cache"}, "no memory behind the cache"),
        ({"trees": "many"}, "not of a form that is known"),
    ],
)
def test_node_path_fails_on(change: dict[str, Any], said: str) -> None:
    gate = judged(subject(check={**CHECK, **change}))[GateId.NODE_PATH]
    assert gate.status is GateStatus.FAIL
    assert said in gate.detail
    assert gate.remedy


def test_a_server_without_a_self_check_fails_both_of_its_gates() -> None:
    found = judged(subject(check=None))
    assert {found[gate].status for gate in (GateId.NODE_PATH, GateId.SIBLING_SWAP)} == {GateStatus.FAIL}
    assert found[GateId.PARITY].status is GateStatus.PASS


def test_sibling_swap_fails_alone() -> None:
    found = judged(subject(check={**CHECK, "sibling_leak_max_diff": 3.0, "sibling_leak_relative": 0.2}))
    assert [gate.id for gate in found.values() if gate.status is GateStatus.FAIL] == [GateId.SIBLING_SWAP]


@pytest.mark.parametrize(
    ("difference", "share", "own", "asked", "status"),
    [
        (0.19, 0.01, 0.1, None, GateStatus.PASS),  # the engine's own noise
        (0.19, 0.01, None, 0.1, GateStatus.PASS),  # what was measured over HTTP
        (0.21, 0.01, 0.1, 0.05, GateStatus.FAIL),  # beyond twice the larger one
        (0.19, 0.01, None, None, GateStatus.FAIL),  # nothing to hold it to
        (0.19, 0.01, 0.0, 0.0, GateStatus.FAIL),
        (3.0, 0.2, 9.0, None, GateStatus.FAIL),  # no rounding does that, whatever the noise
    ],
)
def test_bfloat16_is_held_to_twice_the_noise(
    difference: float, share: float, own: float | None, asked: float | None, status: GateStatus
) -> None:
    check = {**CHECK, "node_path_max_diff": difference, "relative_to_range": share, "noise_max_diff": own}
    found = judged(subject(check=check, dtype="bfloat16"), noise={"bfloat16": asked})
    assert found[GateId.NODE_PATH].status is status


def test_a_step_below_the_spine_fails() -> None:
    rows = {"ddtree": [request_row(0), request_row(1, steps_below_spine=1)]}
    gate = judged(subject(), spines=rows)[GateId.SPINE]
    assert (gate.status, gate.value, gate.evidence["steps_scored"]) == (GateStatus.FAIL, 1, 6)
    unscored = {"ddtree": [request_row(0, steps_scored=0)]}
    assert judged(subject(), spines=unscored)[GateId.SPINE].status is GateStatus.FAIL


def test_totals_of_a_server_stand_for_figures_of_requests() -> None:
    """SGLang counts for all requests together."""
    rows = [request_row(0, tree_steps=None, steps_scored=None, steps_below_spine=None)]
    one = subject(builder=Builder.SPINE_FIRST, budget=31, per_request=False)
    totals = {"requests": 9, "tree_kernel_requests": 9, "below_spine": 0}

    def both(**change: int) -> tuple[GateStatus, GateStatus]:
        counters = {"ddtree": {**totals, **change}}
        found = judged(one, rows={"ddtree": rows}, spines={"ddtree": rows}, counters=counters)
        return found[GateId.SPINE].status, found[GateId.KERNEL_COUNTER].status

    assert both() == (GateStatus.PASS, GateStatus.PASS)
    assert both(below_spine=1) == (GateStatus.FAIL, GateStatus.PASS)
    assert both(tree_kernel_requests=8) == (GateStatus.PASS, GateStatus.FAIL)
    assert both(requests=0, tree_kernel_requests=0) == (GateStatus.FAIL, GateStatus.FAIL)


def test_a_spine_that_cannot_be_judged_leaves_the_verdict_incomplete() -> None:
    short = judged(subject(budget=7, per_request=False))
    assert "budget 7 cuts the spine of 15 nodes" in short[GateId.SPINE].detail
    other = judged(subject(budget=31, per_request=False), spines={})
    for found in (short, other):
        assert found[GateId.SPINE].status is GateStatus.SKIP
        assert gates.verdict(list(found.values())) is Verdict.INCOMPLETE


def test_the_kernel_counter_wants_every_step() -> None:
    rows = {"ddtree": [request_row(0), request_row(1, tree_steps=2)]}
    gate = judged(subject(), rows=rows)[GateId.KERNEL_COUNTER]
    assert (gate.status, gate.value, gate.limit) == (GateStatus.FAIL, 5, 6)
    none = {"ddtree": [request_row(0, tree_steps=None)]}
    gate = judged(subject(), rows=none)[GateId.KERNEL_COUNTER]
    assert (gate.status, gate.detail) == (
        GateStatus.FAIL,
        "the server has no counter of steps on the tree path",
    )


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({"different": 1}, GateStatus.FAIL),
        ({"unknown": 1}, GateStatus.FAIL),
        ({"near_tie": 1}, GateStatus.PASS),
        ({"near_tie": 2}, GateStatus.FAIL),
    ],
)
def test_parity_counts_near_ties_and_forgives_nothing_else(
    counts: dict[str, int], status: GateStatus
) -> None:
    parities = {"ddtree": [parity(), parity(Arm.AR, **counts)]}
    assert judged(subject(), parities=parities)[GateId.PARITY].status is status


def test_in_bfloat16_near_ties_are_counted_only() -> None:
    one = subject(dtype="bfloat16")
    assert judged(one, parities={"ddtree": [parity(near_tie=2)]})[GateId.PARITY].status is GateStatus.PASS


def test_requests_that_failed_prove_nothing() -> None:
    rows = {"ddtree": [request_row(0), request_row(1, status=RequestStatus.FAILED, error="HTTP 500")]}
    found = judged(subject(), rows=rows, spines=rows)
    for gate in (GateId.SPINE, GateId.KERNEL_COUNTER, GateId.PARITY):
        assert found[gate].status is GateStatus.FAIL
        assert "1 of 2 requests failed; p1: HTTP 500" in found[gate].detail


def test_a_control_is_no_part_of_the_verdict_until_it_passes() -> None:
    leaking = {**CHECK, "relative_to_range": 0.4, "sibling_leak_relative": 0.4, "passed": False}
    sound = list(judged(subject()).values())
    control = list(judged(subject(Arm.UNSAFE, leaking)).values())
    assert {gate.status for gate in control if gate.id is GateId.NODE_PATH} == {GateStatus.FAIL}
    assert gates.verdict(sound + control) is Verdict.PASSED
    seeing_nothing = list(judged(subject(Arm.UNSAFE)).values())
    assert gates.verdict(sound + seeing_nothing) is Verdict.INCOMPLETE
    assert {gate.id for gate in gates.blind(seeing_nothing)} == {GateId.NODE_PATH, GateId.SIBLING_SWAP}


def test_sglang_shows_its_figures_with_its_schedulers_state() -> None:
    state = {"ddtree": {"self_check": CHECK, "requests": 3, "tree_kernel_requests": 3, "below_spine": 0}}
    info = {"ddtree": {"arm": "ddtree"}, "internal_states": [state, state]}
    found = self_check_of(info)
    assert found is not None
    assert found.trees == 2
    assert totals_of(info) == {"requests": 6, "tree_kernel_requests": 6, "below_spine": 0}
    assert totals_of({"internal_states": [{"ddtree": {"requests": 3}}]}) is None
    assert self_check_of({"internal_states": None}) is None
    before = {"requests": 6, "tree_kernel_requests": 6, "below_spine": 0}
    assert growth(before, {**before, "requests": 7}) == {**dict.fromkeys(before, 0), "requests": 1}
    assert growth(before, {**before, "requests": 5}) is None  # started anew


def test_a_path_alone_is_judged_for_trees_only() -> None:
    chain = subject(Arm.DFLASH, None)
    assert list(judged(chain)) == [GateId.PARITY]
    assert judged(replace(chain, name="dflash"), parities={}) == {}
