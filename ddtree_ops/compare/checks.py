"""The yes-or-no findings of a run. None means that the run could not show it, never that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddtree_ops.compare.load import Results
from ddtree_ops.compare.measures import Measures, outputs_by_request
from ddtree_ops.compare.parity import shown
from ddtree_ops.compare.verdicts import Metric, baseline_for, paired_ratio
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import GateStatus

#: Key of the headline ratio: ``ddtree`` at this budget over ``dflash``, in accept length.
HEADLINE_BUDGET = 63

Check = bool | int | dict[str, float | int | None] | None


def run_checks(results: Results, measures: Sequence[Measures], *, seed: int = 0) -> dict[str, Check]:
    """Check id -> finding. Booleans judge, integers count, the ratio carries its 95 % interval.

    Outputs are held against each other at temperature 0; above it they prove nothing, either way.
    """
    greedy = [item for item in measures if item.cell.spec.temperature == 0]
    return {
        "all_cells_complete": not results.missing and all(cell.complete for cell in results.cells),
        "shadow_equals_dflash": _every(greedy, Arm.SHADOW, lambda item: _same_output(item, greedy)),
        "dflash_equals_ar": _every(greedy, Arm.DFLASH, _equals_ar),
        "ddtree_equals_ar": _every(greedy, Arm.DDTREE, _equals_ar),
        "ddtree_near_ties": _near_ties(measures),
        "spine_first_steps_below_spine_zero": _every(
            [
                item
                for item in measures
                if item.cell.builder is Builder.SPINE_FIRST and not _spine_cut_off(item)
            ],
            Arm.DDTREE,
            lambda item: None if item.steps_below_spine is None else item.steps_below_spine == 0,
        ),
        "unsafe_fails_parity": _every(
            greedy, Arm.UNSAFE, lambda item: None if (same := _equals_ar(item)) is None else not same
        ),
        "tree_kernels_ran": _every(measures, Arm.DDTREE, _tree_ran),
        "greedy_output_stable": _stable(greedy),
        f"ddtree{HEADLINE_BUDGET}_over_dflash": _headline_ratio(measures, seed),
    }


def failed_checks(checks: dict[str, Check]) -> list[str]:
    """Ids of the boolean checks that are false."""
    return [name for name, value in checks.items() if value is False]


def _every(measures: Sequence[Measures], arm: Arm, check: Callable[[Measures], bool | None]) -> bool | None:
    """False if any cell of the arm fails, None if any can't tell or there is none, else True."""
    found = [check(item) for item in measures if item.cell.arm is arm]
    if False in found:
        return False
    return None if not found or None in found else True


def _same_output(shadow: Measures, measures: Sequence[Measures]) -> bool | None:
    """Token for token on every request that both answered."""
    chain = baseline_for(shadow, measures, Arm.DFLASH)
    if chain is None:
        return None
    ours, theirs = outputs_by_request(shadow.cell), outputs_by_request(chain.cell)
    common = ours.keys() & theirs.keys()
    return all(ours[request] == theirs[request] for request in common) if common else None


def _equals_ar(item: Measures) -> bool | None:
    """None as well where prompts are unknown and none is different: what was not compared proves nothing."""
    parity = item.parity(Arm.AR)
    return None if parity is None else shown(parity)


def _near_ties(measures: Sequence[Measures]) -> int | None:
    found = [item.parity(Arm.AR) for item in measures if item.cell.arm is Arm.DDTREE]
    known = [parity.near_tie for parity in found if parity is not None]
    return sum(known) if known else None


def _spine_cut_off(item: Measures) -> bool:
    """Whether the budget is below F-1, so that the tree cannot hold its spine: the sealed gate knew F."""
    gates = item.cell.record.gates
    return any(gate.id == "steps-below-spine" and gate.status is GateStatus.FIGURE for gate in gates)


def _tree_ran(item: Measures) -> bool | None:
    """The engine's own counter of steps that the forked path verified must cover every request with steps."""
    rows = [row for row in item.cell.ok_rows if row.verify_steps]
    if not rows or all(row.tree_steps is None for row in rows):
        return None
    return all(row.tree_steps for row in rows)


def _stable(greedy: Sequence[Measures]) -> bool | None:
    """In float32 only: in bf16 the batch that a request happens to share may flip a near-tie."""
    repeated = [item for item in greedy if item.cell.spec.repeats > 1 and item.cell.spec.dtype == "float32"]
    return all(item.unstable == 0 for item in repeated) if repeated else None


def _headline_ratio(measures: Sequence[Measures], seed: int) -> dict[str, float | int | None] | None:
    trees = [
        item
        for item in measures
        if item.cell.arm is Arm.DDTREE and item.cell.budget == HEADLINE_BUDGET and item.cell.complete
    ]
    for item in sorted(trees, key=lambda tree: tree.cell.builder is not Builder.BEST_FIRST):
        chain = baseline_for(item, measures, Arm.DFLASH)
        if chain is None or not chain.cell.complete:
            continue
        ratio = paired_ratio(item.frame, chain.frame, Metric.ACCEPT_LENGTH, seed=seed)
        if ratio is not None:
            return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "prompts": ratio.n}
    return None
