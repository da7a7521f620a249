from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.bench.gates import Evidence, failed, judge
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import (
    GateStatus,
    Parity,
    ParityClass,
    ParityFinding,
    RequestRow,
    RequestStatus,
)
from tests.support.ops import cell_spec, request_row

LOOP = [1, 2, 3] * 20


def evidence(rows: list[RequestRow] | None = None, **changes: Any) -> Evidence:
    fields: dict[str, Any] = {
        "spec": cell_spec(),
        "rows": rows if rows is not None else [request_row(n) for n in range(4)],
        "parity": [parity(Arm.AR), parity(Arm.DFLASH)],
        "references": {
            Arm.AR: [request_row(n) for n in range(4)],
            Arm.DFLASH: [request_row(n) for n in range(4)],
        },
    }
    return Evidence(**{**fields, **changes})


def parity(reference: Arm, *, near_tie: int = 0, different: int = 0, unknown: int = 0) -> Parity:
    kinds = [ParityClass.NEAR_TIE] * near_tie + [ParityClass.DIFFERENT] * different
    return Parity(
        reference=reference,
        identical=4 - near_tie - different - unknown,
        near_tie=near_tie,
        different=different,
        unknown=unknown,
        findings=[ParityFinding(prompt_id=f"p{n}", parity=kind) for n, kind in enumerate(kinds)],
    )


def failures(found: Evidence) -> list[str]:
    return [gate.id for gate in failed(judge(found))]


def status(found: Evidence, gate_id: str) -> GateStatus:
    return next(gate.status for gate in judge(found) if gate.id == gate_id)


def test_a_sound_cell_passes() -> None:
    assert failures(evidence()) == []


@pytest.mark.parametrize(
    ("gate_id", "row"),
    [
        ("cold-cache", {"cached_tokens": 5}),
        ("full-length", {"completion_tokens": 7}),
        ("steps-add-up", {"accept_histogram": [1, 2, 1]}),
        ("steps-add-up", {"accept_histogram": [3]}),
        ("kernel-path", {"tree_steps": 0}),
        ("kernel-path", {"tree_steps": None}),
        ("empty", {"empty": True}),
        ("loops", {"loop": True}),
    ],
)
def test_one_bad_request_fails_its_gate(gate_id: str, row: dict[str, Any]) -> None:
    rows = [request_row(0, **row), *(request_row(n) for n in range(1, 4))]
    assert failures(evidence(rows)) == [gate_id]


@pytest.mark.parametrize(
    ("totals", "failing"),
    [
        ({"requests": 12, "tree_kernel_requests": 12, "below_spine": 0}, []),
        ({"requests": 12, "tree_kernel_requests": 11, "below_spine": 0}, ["kernel-path"]),
        ({"requests": 0, "tree_kernel_requests": 0, "below_spine": 0}, ["kernel-path", "steps-below-spine"]),
        ({"requests": 12, "tree_kernel_requests": 12, "below_spine": 1}, ["steps-below-spine"]),
        (None, ["kernel-path", "steps-below-spine"]),
    ],
)
def test_a_server_s_totals_stand_for_figures_that_requests_lack(
    totals: dict[str, int] | None, failing: list[str]
) -> None:
    """SGLang counts for all requests together."""
    bare = {"tree_steps": None, "steps_scored": None, "steps_below_spine": None}
    rows = [request_row(n, **bare) for n in range(4)]
    spec = cell_spec(builder=Builder.SPINE_FIRST)
    assert failures(evidence(rows, spec=spec, totals=totals)) == failing
    unsafe = evidence(rows, spec=cell_spec(arm=Arm.UNSAFE), totals=totals)
    assert totals is None or status(unsafe, "kernel-path") is GateStatus.FIGURE


def test_a_complaint_about_the_server_fails() -> None:
    assert failures(evidence(complaint="topk changed")) == ["arguments"]


@pytest.mark.parametrize("reference", [Arm.AR, Arm.DFLASH])
@pytest.mark.parametrize("kind", ["different", "unknown"])
def test_one_prompt_that_differs_or_is_not_compared_fails_parity(reference: Arm, kind: str) -> None:
    others = [parity(arm) for arm in (Arm.AR, Arm.DFLASH) if arm is not reference]
    found = evidence(parity=[parity(reference, **{kind: 1}), *others])
    assert failures(found) == [f"parity-{reference}"]


def test_parity_of_unsafe_is_a_figure() -> None:
    found = evidence(
        spec=cell_spec(arm=Arm.UNSAFE),
        parity=[parity(Arm.AR, different=4)],
        rows=[request_row(n, loop=True, empty=True) for n in range(4)],
    )
    assert failures(found) == []
    assert status(found, "parity-ar") is GateStatus.FIGURE


def test_parity_without_a_reference_or_with_sampling_is_skipped() -> None:
    assert status(evidence(parity=[]), "parity-ar") is GateStatus.SKIP
    assert status(evidence(spec=cell_spec(temperature=0.7)), "parity-ar") is GateStatus.SKIP


def test_near_ties_in_float32_are_few() -> None:
    assert failures(evidence(parity=[parity(Arm.AR, near_tie=1)])) == []
    assert failures(evidence(parity=[parity(Arm.AR, near_tie=2)])) == ["near-ties"]
    many = cell_spec(prompts=100)
    assert failures(evidence(spec=many, parity=[parity(Arm.AR, near_tie=2)])) == []
    assert failures(evidence(spec=many, parity=[parity(Arm.AR, near_tie=3)])) == ["near-ties"]
    assert failures(evidence(spec=cell_spec(dtype="bfloat16"), parity=[parity(Arm.AR, near_tie=4)])) == []


def test_steps_below_the_spine_fail_spine_first_only() -> None:
    rows = [request_row(n, steps_below_spine=1) for n in range(4)]
    assert failures(evidence(rows)) == []
    assert failures(evidence(rows, spec=cell_spec(builder=Builder.SPINE_FIRST))) == ["steps-below-spine"]
    cut = cell_spec(builder=Builder.SPINE_FIRST, budget=7)
    assert status(evidence(rows, spec=cut), "steps-below-spine") is GateStatus.FIGURE
    assert failures(evidence(rows, spec=cut, block=8)) == ["steps-below-spine"]
    unscored = [request_row(n, steps_scored=0) for n in range(4)]
    assert failures(evidence(unscored, spec=cell_spec(builder=Builder.SPINE_FIRST))) == ["steps-below-spine"]


def test_loops_and_empty_answers_count_beyond_ar_only() -> None:
    rows = [request_row(0, loop=True, empty=True), *(request_row(n) for n in range(1, 4))]
    assert failures(evidence(rows)) == ["empty", "loops"]
    same = {Arm.AR: [request_row(0, loop=True, empty=True)]}
    assert failures(evidence(rows, references=same)) == []


def test_a_loop_after_a_near_tie_is_excused() -> None:
    rows = [request_row(0, loop=True), *(request_row(n) for n in range(1, 4))]
    assert failures(evidence(rows, parity=[parity(Arm.AR, near_tie=1)])) == []


def test_shadow_must_equal_dflash_even_in_near_ties() -> None:
    shadow = cell_spec(arm=Arm.SHADOW)
    assert failures(evidence(spec=shadow)) == []
    rows = [request_row(0, output=[1, 2, 3, 4, 5, 6, 7, 9]), *(request_row(n) for n in range(1, 4))]
    assert failures(evidence(rows, spec=shadow)) == ["shadow-equals-dflash"]


def test_failed_requests_are_not_judged() -> None:
    bad = request_row(0, status=RequestStatus.FAILED, completion_tokens=0, verify_steps=None, tree_steps=None)
    assert failures(evidence([bad, *(request_row(n) for n in range(1, 4))])) == []
