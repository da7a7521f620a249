"""The gates: five statements that hold on any host, whatever the model, and need no oracle.

Each has a stable id and a remedy of one line; `docs/acceptance.md` lists them. The arm `unsafe` is judged by
the same gates as a control: it has to fail them, and a control that passes shows that a gate sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.bench.gates import NEAR_TIE_SHARE
from ddtree_ops.bench.parity import NOISE_FACTOR
from ddtree_ops.schemas.acceptance import GateId, GateResult, SelfCheckFigures, Verdict
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import GateStatus, Parity, RequestRow, RequestStatus
from ddtree_ops.verify.measure import Findings, holds_spine
from ddtree_ops.verify.subjects import TREE_ARMS, Subject

FLOAT32 = "float32"
FLOAT32_TOLERANCE = 1e-4
#: However large the noise: rounding does not move logits by more than this share of their range.
COARSE_TOLERANCE = 8e-2

PASS, FAIL, SKIP = GateStatus.PASS, GateStatus.FAIL, GateStatus.SKIP


@dataclass(frozen=True)
class GateRow:
    """What a gate is about, for people."""

    id: GateId
    title: str
    remedy: str


ROWS = {
    row.id: row
    for row in (
        GateRow(
            GateId.NODE_PATH,
            "a node's logits are those of its path, run alone",
            "do not serve: recurrent states or masks are wrong; send us the bundle and the server's log",
        ),
        GateRow(
            GateId.SIBLING_SWAP,
            "other tokens on other branches change nothing",
            "do not serve: siblings read each other's state; send us the bundle and the server's log",
        ),
        GateRow(
            GateId.SPINE,
            "no step of a spine-first tree accepts less than its own top-1 chain",
            "a bug of the builder or of the accept walk; send us the bundle",
        ),
        GateRow(
            GateId.KERNEL_COUNTER,
            "every step was verified by the tree path",
            "the server fell back to something else: read its log, and its arguments in summary.json",
        ),
        GateRow(
            GateId.PARITY,
            "greedy output is the chain's, near-ties apart",
            "look at prompt, place and gap in the gate's evidence; gaps far above the limit: do not serve",
        ),
    )
}

Judged = tuple[GateStatus, float | None, float | None, str, dict[str, Any]]


def judge(findings: Findings) -> list[GateResult]:
    """All gates that apply, by gate and then in the services' order."""
    return [
        _result(gate, subject, outcome)
        for gate, check in CHECKS.items()
        for subject in findings.subjects
        if (outcome := check(subject, findings)) is not None
    ]


def verdict(gates: Sequence[GateResult]) -> Verdict:
    """Failed if a gate failed; incomplete if one was not judged, or a control passed what it must fail."""
    counted = [gate for gate in gates if not gate.control]
    if any(gate.status is FAIL for gate in counted):
        return Verdict.FAILED
    if any(gate.status is SKIP for gate in counted) or blind(gates):
        return Verdict.INCOMPLETE
    return Verdict.PASSED


def blind(gates: Sequence[GateResult]) -> list[GateResult]:
    """Results of the control that show that a gate sees nothing: leaking states have to be noticed."""
    must_fail = (GateId.NODE_PATH, GateId.SIBLING_SWAP)
    return [gate for gate in gates if gate.control and gate.id in must_fail and gate.status is PASS]


def _result(gate: GateId, subject: Subject, outcome: Judged) -> GateResult:
    status, value, limit, detail, evidence = outcome
    return GateResult(
        id=gate,
        service=subject.name,
        status=status,
        value=value,
        limit=limit,
        detail=detail,
        remedy="" if status is PASS else ROWS[gate].remedy,
        control=subject.arm is Arm.UNSAFE,
        evidence=evidence,
    )


# -- node = path, sibling swap ------------------------------------------------------------------------------


def _node_path(subject: Subject, findings: Findings) -> Judged | None:
    return _self_checked(
        subject,
        findings,
        lambda found: (found.node_path_max_diff, found.relative_to_range),
        "node and path differ by",
    )


def _sibling_swap(subject: Subject, findings: Findings) -> Judged | None:
    return _self_checked(
        subject,
        findings,
        lambda found: (found.sibling_leak_max_diff, found.sibling_leak_relative),
        "another branch moved logits by",
    )


def _self_checked(
    subject: Subject,
    findings: Findings,
    figures: Callable[[SelfCheckFigures], tuple[float | None, float | None]],
    words: str,
) -> Judged | None:
    """Judge two figures of the start-up self-check: a difference in logits, and its share of their range."""
    if subject.arm not in TREE_ARMS:
        return None
    found = subject.self_check
    if found is None or not found.trees:
        if subject.arm is Arm.UNSAFE:
            return SKIP, None, None, "this engine runs no self-check in mode unsafe", {}
        why = (found and found.skipped) or "none was run"
        return FAIL, None, None, f"no start-up self-check: {why}; start the server with one", {}
    evidence = found.model_dump(mode="json", exclude_none=True)
    plain, share = figures(found)
    if plain is None or share is None:
        return FAIL, None, None, "the self-check's figure is not a number", evidence
    if subject.dtype == FLOAT32:
        detail = f"{words} {share:.2g} of the range, allowed {FLOAT32_TOLERANCE:.2g}, {found.trees} trees"
        return _at_most(share, FLOAT32_TOLERANCE, detail, evidence, also=found.passed is True)
    noise = max(found.noise_max_diff or 0.0, findings.noise.get(subject.dtype) or 0.0)
    evidence |= {"noise": noise, "noise_factor": NOISE_FACTOR, "coarse_tolerance": COARSE_TOLERANCE}
    if noise <= 0:
        return FAIL, plain, None, f"{words} {plain:.2g}, and the noise could not be measured", evidence
    limit = NOISE_FACTOR * noise
    detail = (
        f"{words} {plain:.2g} ({share:.2g} of the range), "
        f"allowed {limit:.2g}, twice the noise of {subject.dtype}, {found.trees} trees"
    )
    return _at_most(plain, limit, detail, evidence, also=found.passed is True and share <= COARSE_TOLERANCE)


# -- spine, kernel counter ----------------------------------------------------------------------------------


def _spine(subject: Subject, findings: Findings) -> Judged | None:
    if subject.arm is not Arm.DDTREE:
        return None
    if not holds_spine(subject):
        detail = f"budget {subject.budget} cuts the spine of {subject.block - 1} nodes"
        return SKIP, None, None, f"{detail}; judge a larger budget", {}
    rows = findings.spines.get(subject.name)
    if rows is None:
        return SKIP, None, None, f"it grows {subject.builder} trees; judge a service with spine-first", {}
    if broken := _broken(rows):
        return FAIL, None, 0, broken, {}
    if all(row.steps_scored is not None for row in rows):
        below, scored = (
            sum(getattr(row, key) or 0 for row in rows) for key in ("steps_below_spine", "steps_scored")
        )
    else:  # this server counts for all requests together
        totals = findings.counters.get(subject.name, {})
        below, scored = totals.get("below_spine", 0), totals.get("requests", 0)
    evidence = {"steps_below_spine": below, "steps_scored": scored}
    if not scored:
        return FAIL, None, 0, "no step was scored", evidence
    return _at_most(below, 0, f"{below} of {scored} steps below their own chain", evidence)


def _kernel_counter(subject: Subject, findings: Findings) -> Judged | None:
    if subject.arm not in TREE_ARMS:
        return None
    rows = findings.rows[subject.name]
    if broken := _broken(rows):
        return FAIL, None, None, broken, {}
    totals = findings.counters.get(subject.name)
    if all(row.tree_steps is not None for row in rows):
        ran, steps = sum(row.tree_steps or 0 for row in rows), sum(row.verify_steps or 0 for row in rows)
    elif totals is not None and subject.arm is Arm.UNSAFE:
        return SKIP, None, None, "this engine's counter knows forked states only", {}
    elif totals is not None:
        ran, steps = totals["tree_kernel_requests"], totals["requests"]
    else:
        return FAIL, None, None, "the server has no counter of steps on the tree path", {}
    evidence = {"tree_steps": ran, "verify_steps": steps}
    detail = f"{ran} of {steps} verify steps on the tree path"
    status = PASS if ran == steps > 0 else FAIL
    return status, ran, steps, detail, evidence


# -- parity -------------------------------------------------------------------------------------------------


def _parity(subject: Subject, findings: Findings) -> Judged | None:
    parities = findings.parities.get(subject.name, ())
    if not parities:
        return None
    if broken := _broken(findings.rows[subject.name]):
        return FAIL, None, 0, broken, {}
    wrong = max(parity.different + parity.unknown for parity in parities)
    ties = max(parity.near_tie for parity in parities)
    allowed = _allowed_ties(subject, len(findings.load.prompts))
    detail = "; ".join(_counts(parity) for parity in parities)
    evidence = {parity.reference.value: parity.model_dump(mode="json") for parity in parities}
    if ties > allowed:
        return FAIL, wrong, 0, f"{detail}; at most {allowed} near-ties are allowed in {FLOAT32}", evidence
    return _at_most(wrong, 0, detail, evidence)


def _allowed_ties(subject: Subject, prompts: int) -> int:
    """In float32 near-ties are rare: more of them than 2 % of the prompts hide a fault. One always may be."""
    return max(1, int(NEAR_TIE_SHARE * prompts)) if subject.dtype == FLOAT32 else prompts


def _counts(parity: Parity) -> str:
    return (
        f"beside {parity.reference.value}: {parity.identical} identical, {parity.near_tie} near-ties, "
        f"{parity.different} different, {parity.unknown} unknown"
    )


# -- shared -------------------------------------------------------------------------------------------------


def _broken(rows: Sequence[RequestRow]) -> str | None:
    """Failed requests, in words: what was not answered proves nothing."""
    failed = [row for row in rows if row.status is not RequestStatus.OK]
    if not failed:
        return None
    return f"{len(failed)} of {len(rows)} requests failed; {failed[0].prompt_id}: {failed[0].error}"


def _at_most(
    value: float, limit: float, detail: str, evidence: dict[str, Any], *, also: bool = True
) -> Judged:
    return PASS if value <= limit and also else FAIL, value, limit, detail, evidence


CHECKS: dict[GateId, Callable[[Subject, Findings], Judged | None]] = {
    GateId.NODE_PATH: _node_path,
    GateId.SIBLING_SWAP: _sibling_swap,
    GateId.SPINE: _spine,
    GateId.KERNEL_COUNTER: _kernel_counter,
    GateId.PARITY: _parity,
}
