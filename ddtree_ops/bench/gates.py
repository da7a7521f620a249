"""The correctness gates of a cell. Every gate has a stable id; `docs/sweeps.md` lists them with their
remedies.

A gate that fails makes the cell invalid: its numbers exist and must not be used. For the arm `unsafe`, whose
output is wrong by construction, parity is a figure: failing is what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import CardUse, CellSpec, Gate, GateStatus, Parity, RequestRow, RequestStatus
from ddtree_ops.services.cards import faults

NEAR_TIE_SHARE = 0.02
DEFAULT_BLOCK = 16


@dataclass(frozen=True)
class Uses:
    """What a cell's GPUs did while they answered it, and what is not known of that, with the reason."""

    found: list[CardUse] | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known of a cell when it is judged.

    rows        all its rows
    parity      against each reference that the sweep has, at T=0
    references  rows of the `ar` and `dflash` cells of the same block
    complaint   what its server said at the end that differs from what was asked
    block       F, the drafter's block with its root: a spine has F-1 nodes
    totals      how its server's totals grew meanwhile; only for servers that count for all requests together
    cards       what its GPUs did
    """

    spec: CellSpec
    rows: Sequence[RequestRow]
    parity: Sequence[Parity] = ()
    references: Mapping[Arm, Sequence[RequestRow]] = field(default_factory=dict)
    complaint: str | None = None
    block: int = DEFAULT_BLOCK
    totals: Mapping[str, int] | None = None
    cards: Uses = Uses()

    @property
    def good(self) -> list[RequestRow]:
        return [row for row in self.rows if row.status is RequestStatus.OK]


def judge(evidence: Evidence) -> list[Gate]:
    """All gates that apply to the cell, in a fixed order."""
    return [gate for check in GATES if (gate := check(evidence)) is not None]


def failed(gates: Sequence[Gate]) -> list[Gate]:
    return [gate for gate in gates if gate.status is GateStatus.FAIL]


def _arguments(evidence: Evidence) -> Gate:
    """The server ran as asked, before and after, and did not make its acceptance up."""
    if evidence.complaint:
        return Gate(id="arguments", status=GateStatus.FAIL, detail=evidence.complaint)
    return Gate(id="arguments", status=GateStatus.PASS)


def _cold_cache(evidence: Evidence) -> Gate:
    """No request found its prompt in the prefix cache: a warm hit flatters the arm that goes second."""
    cached = sum(row.cached_tokens for row in evidence.rows)
    return _at_most("cold-cache", cached, 0, "cached prompt tokens")


def _full_length(evidence: Evidence) -> Gate | None:
    """With ignore_eos all requests decode max_tokens, so that arms do equal work."""
    if not evidence.spec.ignore_eos:
        return None
    short = sum(row.completion_tokens != evidence.spec.max_tokens for row in evidence.good)
    return _at_most("full-length", short, 0, f"requests that did not give {evidence.spec.max_tokens} tokens")


def _steps_add_up(evidence: Evidence) -> Gate | None:
    """The histogram of accepted drafts counts every verify step once and all the tokens that they gave."""
    if evidence.spec.arm is Arm.AR:
        return None
    wrong = sum(not _adds_up(row) for row in evidence.good)
    return _at_most(
        "steps-add-up", wrong, 0, "requests whose accept histogram contradicts their verify steps"
    )


def _adds_up(row: RequestRow) -> bool:
    if not row.verify_steps:
        return row.completion_tokens <= 1
    if sum(row.accept_histogram) != row.verify_steps:
        return False
    emitted = row.verify_steps + sum(n * steps for n, steps in enumerate(row.accept_histogram))
    # The prefill may count as one token more, and the last step is cut at max_tokens.
    return emitted >= row.completion_tokens - 1


def _kernel_path(evidence: Evidence) -> Gate | None:
    """A counter proves that trees were verified by the path that is being measured."""
    if evidence.spec.arm not in {Arm.DDTREE, Arm.UNSAFE}:
        return None
    totals = evidence.totals
    if totals is not None and all(row.tree_steps is None for row in evidence.good):
        seen, steps = totals["tree_kernel_requests"], totals["requests"]
        detail = f"{seen} of {steps} steps of requests on the tree path"
        if evidence.spec.arm is Arm.UNSAFE:  # such a counter knows forked states only
            return Gate(id="kernel-path", status=GateStatus.FIGURE, value=seen, detail=detail)
        if not steps:
            return Gate(id="kernel-path", status=GateStatus.FAIL, value=0, detail="no step was counted")
        return _at_most("kernel-path", steps - seen, 0, detail)
    idle = sum(not row.tree_steps for row in evidence.good if row.verify_steps)
    return _at_most("kernel-path", idle, 0, "requests without a step on the tree path")


def _steps_below_spine(evidence: Evidence) -> Gate | None:
    """Steps that accepted less than their own top-1 chain: a bug with spine-first trees, else the builder's
    choice.
    """
    spec = evidence.spec
    if not spec.arm.takes_budget or spec.budget is None:
        return None
    below = sum(row.steps_below_spine or 0 for row in evidence.good)
    scored = sum(row.steps_scored or 0 for row in evidence.good)
    if evidence.totals is not None and all(row.steps_scored is None for row in evidence.good):
        below, scored = evidence.totals["below_spine"], evidence.totals["requests"]
    detail = f"{below} of {scored} scored steps"
    # A budget below F-1 cuts the spine itself, and what was cut off can't be accepted.
    holds_spine = spec.builder is Builder.SPINE_FIRST and spec.budget >= evidence.block - 1
    if not holds_spine or not spec.arm.lossless:
        return Gate(id="steps-below-spine", status=GateStatus.FIGURE, value=below, detail=detail)
    if not scored:
        return Gate(id="steps-below-spine", status=GateStatus.FAIL, value=0, detail="no step was scored")
    return _at_most("steps-below-spine", below, 0, detail)


def _empty(evidence: Evidence) -> Gate | None:
    return _beyond_ar("empty", evidence, lambda row: row.empty)


def _loops(evidence: Evidence) -> Gate | None:
    return _beyond_ar("loops", evidence, lambda row: row.loop)


def _beyond_ar(gate_id: str, evidence: Evidence, flag: Callable[[RequestRow], bool]) -> Gate:
    """Outputs with a flaw count against an arm only where `ar`'s output to the same prompt has none."""
    bad = {(row.prompt_id, row.repeat) for row in evidence.good if flag(row)}
    reference = evidence.references.get(Arm.AR)
    if evidence.spec.arm is Arm.AR or reference is None or evidence.spec.temperature > 0:
        return Gate(id=gate_id, status=GateStatus.FIGURE, value=len(bad), detail=f"{len(bad)} outputs")
    theirs = {(row.prompt_id, row.repeat) for row in reference if flag(row)}
    beyond = len(bad - theirs)
    detail = f"{len(bad)} outputs, {beyond} of them where ar's is sound"
    if not evidence.spec.arm.lossless:
        return Gate(id=gate_id, status=GateStatus.FIGURE, value=beyond, detail=detail)
    # Where parity is judged, another answer to a near-tie may end in a loop by right.
    ties = {
        finding.prompt_id
        for parity in evidence.parity
        if parity.reference is Arm.AR
        for finding in parity.findings
        if finding.parity.value == "near_tie"
    }
    excused = sum(prompt in ties for prompt, _ in bad - theirs)
    return _at_most(gate_id, beyond - excused, 0, detail)


def _parity(reference: Arm) -> Callable[[Evidence], Gate | None]:
    def check(evidence: Evidence) -> Gate | None:
        gate_id = f"parity-{reference.value}"
        if evidence.spec.arm in {Arm.AR, reference}:
            return None
        if evidence.spec.temperature > 0:
            return Gate(id=gate_id, status=GateStatus.SKIP, detail="judged at temperature 0 only")
        found = next((parity for parity in evidence.parity if parity.reference is reference), None)
        if found is None:
            return Gate(
                id=gate_id, status=GateStatus.SKIP, detail=f"no {reference.value} cell to compare with"
            )
        wrong = found.different
        detail = (
            f"{found.identical} identical, {found.near_tie} near-ties, "
            f"{found.different} different, {found.unknown} unknown"
        )
        if not evidence.spec.arm.lossless:
            return Gate(id=gate_id, status=GateStatus.FIGURE, value=wrong, detail=detail)
        return _at_most(gate_id, wrong + found.unknown, 0, detail)

    return check


def _near_ties(evidence: Evidence) -> Gate | None:
    """In float32 near-ties are rare: more of them than 2 % of the prompts hide a fault."""
    spec = evidence.spec
    if not evidence.parity or not spec.arm.lossless or spec.arm is Arm.AR:
        return None
    ties = max(parity.near_tie for parity in evidence.parity)
    detail = f"{ties} of {spec.prompts} prompts"
    if spec.dtype != "float32":
        return Gate(id="near-ties", status=GateStatus.FIGURE, value=ties, detail=detail)
    # One is allowed however few the prompts are: it says nothing of a share of 2 %.
    return _at_most("near-ties", ties, max(1, int(NEAR_TIE_SHARE * spec.prompts)), detail)


def _shadow_equals_dflash(evidence: Evidence) -> Gate | None:
    """`shadow` verifies the chain only, so its outputs are `dflash`'s, to the token, near-ties included."""
    reference = evidence.references.get(Arm.DFLASH)
    if evidence.spec.arm is not Arm.SHADOW or reference is None or evidence.spec.temperature > 0:
        return None
    theirs = {(row.prompt_id, row.repeat): row for row in reference if row.status is RequestStatus.OK}
    pairs = [(row, theirs.get((row.prompt_id, row.repeat))) for row in evidence.good]
    wrong = sum(other is not None and row.output_ids != other.output_ids for row, other in pairs)
    return _at_most("shadow-equals-dflash", wrong, 0, "outputs that differ")


def _throttled(evidence: Evidence) -> Gate | None:
    """A card that held its clocks down for heat or a fault measures that, not the arm."""
    gpus = any(row.replica is not None and row.replica.gpus for row in evidence.rows)
    if evidence.cards.found is None:
        if not gpus:
            return None
        return Gate(id="throttled", status=GateStatus.SKIP, detail=f"not sampled: {evidence.cards.missing}")
    if not any(use.reasons_known for use in evidence.cards.found):
        return Gate(id="throttled", status=GateStatus.SKIP, detail="the cards do not say")
    bad = faults(evidence.cards.found)
    return _at_most("throttled", len(bad), 0, "; ".join(bad))


def _at_most(gate_id: str, value: float, limit: float, detail: str) -> Gate:
    status = GateStatus.PASS if value <= limit else GateStatus.FAIL
    return Gate(id=gate_id, status=status, value=value, limit=limit, detail=detail)


GATES: tuple[Callable[[Evidence], Gate | None], ...] = (
    _arguments,
    _cold_cache,
    _full_length,
    _steps_add_up,
    _kernel_path,
    _parity(Arm.AR),
    _parity(Arm.DFLASH),
    _near_ties,
    _shadow_equals_dflash,
    _steps_below_spine,
    _empty,
    _loops,
    _throttled,
)
