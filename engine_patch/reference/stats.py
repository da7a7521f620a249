"""Figures of one request: stage times, tree sizes, acceptance, and steps scored against the real output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ddtree_engine.tree import Tree, chain_accept, tree_accept
from numpy.typing import NDArray

STAGES = ("draft", "build", "verify", "commit")


@dataclass(frozen=True)
class StepRecord:
    """One verify step. `anchor` is the index in the output of the step's root (bonus) token.

    ids int64 [F-1, K], logprobs float32 [F-1, K]: the drafter's candidates; `tree` is set when one was built;
    `matched` counts the accepted drafts.
    """

    anchor: int
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    tree: Tree | None
    matched: int


@dataclass
class RequestStats:
    """Accumulated while a request runs."""

    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    steps: list[StepRecord] = field(default_factory=list)
    proposed: int = 0
    tree_nodes: int = 0
    tree_steps: int = 0

    @property
    def verify_steps(self) -> int:
        """Verify passes of the target."""
        return len(self.steps)

    @property
    def accepted(self) -> int:
        """Accepted drafts over all steps, as SGLang counts them: before the output is cut at a stop."""
        return sum(step.matched for step in self.steps)

    def histogram(self) -> list[int]:
        """Steps by number of accepted drafts, from 0 to the most seen."""
        return _histogram([step.matched for step in self.steps])


@dataclass(frozen=True)
class Scores:
    """Steps scored against the output.

    A step is scored as far as tokens after its anchor are known; one without any is not scored. Accept
    lengths are means of the tokens that a step would have put into the output: matched drafts and the bonus
    token, as far as the output goes.
    """

    scored: int
    below_spine: int
    spine_accept_length: float | None
    tree_accept_length: float | None
    tree_histogram: list[int]


def score(steps: Sequence[StepRecord], output: Sequence[int]) -> Scores:
    """Score every step's own chain (rank-0 candidates), and its tree if any, against the tokens produced."""
    spine_total = tree_total = below = scored = 0
    tree_matches = []
    for step in steps:
        truth = output[step.anchor + 1 :]
        if not truth:
            continue
        scored += 1
        spine = chain_accept(step.ids[:, 0].tolist(), truth)
        below += step.matched < spine
        spine_total += min(spine + 1, len(truth))
        if step.tree is not None:
            matched = tree_accept(step.tree, truth)
            tree_matches.append(matched)
            tree_total += min(matched + 1, len(truth))
    return Scores(
        scored=scored,
        below_spine=below,
        spine_accept_length=spine_total / scored if scored else None,
        tree_accept_length=tree_total / len(tree_matches) if tree_matches else None,
        tree_histogram=_histogram(tree_matches),
    )


def tables(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """The candidate tables as JSON: what a calibration is fitted from."""
    return [
        {"anchor": step.anchor, "ids": step.ids.tolist(), "logprobs": np.round(step.logprobs, 5).tolist()}
        for step in steps
    ]


def _histogram(values: Sequence[int]) -> list[int]:
    return np.bincount(np.asarray(values, dtype=np.int64)).tolist() if values else []
