"""Draft trees from the drafter's per-position candidates.

The drafter gives, for every position d = 1..F-1 after the root, K candidate tokens with full-vocabulary
log-probabilities. Positions are drafted in one pass, so a path's log-score is the sum of its candidates'
scores, and the B most probable prefixes are found with a priority queue (DDTree, arXiv 2604.12989; here
with one queue entry per open parent).

**Order and ties, so that any other builder can reproduce the tree node for node.**
- Log-probabilities are float32 (wider input is rounded), values in (0, 1e-3] count as 0. The score of a
  path is the float32 sum of its edge scores, added in path order from the root's 0.0:
  `score(child) = f32(score(parent) + edge)`.
- A parent offers its children in the order (edge score descending, column ascending).
- Of all parents' next offers the one with the highest score is taken; equal scores go to the parent with
  the smaller index. The taken child gets the next index.
- Candidates with a log-probability of -inf are never offered. When no offer is left the tree is smaller
  than the budget.
- `spine-first` takes the chain of column 0 before everything else (nodes 1..min(F-1, B), cut at the first
  -inf), then goes on as above. `calibrated` goes as `best-first` with the edge scores of
  `ddtree_engine.tree.calibration`, which differ on and off the spine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from ddtree_engine.tree.calibration import Calibration
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.nodes import Tree, tree_of
from numpy.typing import ArrayLike, NDArray

# logit - logsumexp can round to just above zero.
LOGPROB_SLACK = 1e-3

# One position's candidates as offered: (edge score, column), best first.
Offers = list[list[tuple[float, int]]]


class Builder(StrEnum):
    """How a tree is grown."""

    BEST_FIRST = "best-first"
    SPINE_FIRST = "spine-first"
    CALIBRATED = "calibrated"


def build_tree(
    root_token: int,
    ids: ArrayLike,
    logprobs: ArrayLike,
    budget: int,
    builder: Builder = Builder.BEST_FIRST,
    calibration: Calibration | None = None,
) -> Tree:
    """Grow a tree of at most `budget` nodes below the root.

    ids          int[F-1, K], candidate tokens per position, best first (column 0 is the spine),
                 distinct within a row
    logprobs     float[F-1, K], their natural log-probabilities over the whole vocabulary; -inf = no
                 candidate (how a vocabulary smaller than K is padded)
    budget       nodes without the root; 0 gives the root alone, more than the table can hold gives
                 what it holds
    calibration  only with, and needed by, `Builder.CALIBRATED`

    Raises `TreeInputError` for a negative budget, wrong shapes or dtypes, NaN or positive
    log-probabilities, and a calibration that does not fit. Time is O(F K log K + B log B).
    """
    ids, logprobs = _checked_table(ids, logprobs)
    budget = _checked_budget(budget)
    builder = Builder(builder)
    if (builder is Builder.CALIBRATED) != (calibration is not None):
        raise TreeInputError(
            f"builder {builder.value!r} and calibration {'given' if calibration else 'missing'}: "
            f"a calibration belongs to builder {Builder.CALIBRATED.value!r} and to no other"
        )
    if calibration is None:
        on_spine = off_spine = _offers(logprobs, logprobs)
    else:
        on_spine = _offers(calibration.edge_scores(logprobs, on_spine=True), logprobs)
        off_spine = _offers(calibration.edge_scores(logprobs, on_spine=False), logprobs)
    spine_length = len(ids) if builder is Builder.SPINE_FIRST else 0
    return _grow(int(root_token), ids.tolist(), logprobs, budget, on_spine, off_spine, spine_length)


def chain_tree(root_token: int, ids: ArrayLike, logprobs: ArrayLike, length: int) -> Tree:
    """The chain of column 0 with at most `length` nodes below the root, as plain DFlash drafts it.

    Arguments and errors as in `build_tree`; scores are path log-probabilities.
    """
    ids, logprobs = _checked_table(ids, logprobs)
    length = _checked_budget(length)
    first = _offers(logprobs[:, :1], logprobs[:, :1])
    return _grow(int(root_token), ids.tolist(), logprobs, length, first, first, len(ids))


def _grow(
    root_token: int,
    ids: list[list[int]],
    logprobs: NDArray[np.float32],
    budget: int,
    on_spine: Offers,
    off_spine: Offers,
    spine_length: int,
) -> Tree:
    tokens, parents, depths, scores, ranks = [root_token], [-1], [0], [0.0], [0]
    spine = [True]
    queue: list[tuple[float, int, int]] = []  # (-score, parent, position of the offer in the parent's list)
    f32 = np.float32

    def offer(parent: int, nth: int) -> None:
        depth = depths[parent]
        if depth == len(ids):
            return
        offers = (on_spine if spine[parent] else off_spine)[depth]
        if nth < len(offers) and parent < taken_spine and offers[nth][1] == 0:
            nth += 1
        if nth < len(offers):
            heapq.heappush(queue, (-float(f32(scores[parent] + offers[nth][0])), parent, nth))

    def take(parent: int, column: int, score: float) -> None:
        depth = depths[parent]
        tokens.append(ids[depth][column])
        parents.append(parent)
        depths.append(depth + 1)
        scores.append(score)
        ranks.append(column)
        spine.append(spine[parent] and column == 0)

    taken_spine = 0  # nodes 0..taken_spine-1 have their column-0 child already
    for depth in range(min(spine_length, budget)):
        edge = float(logprobs[depth, 0])
        if edge == -np.inf:
            break
        take(depth, 0, float(f32(scores[depth] + edge)))
        taken_spine += 1
    for parent in range(taken_spine + 1):
        offer(parent, 0)
    while queue and len(tokens) <= budget:
        score, parent, nth = heapq.heappop(queue)
        offers = (on_spine if spine[parent] else off_spine)[depths[parent]]
        take(parent, offers[nth][1], -score)
        offer(parent, nth + 1)
        offer(len(tokens) - 1, 0)
    return tree_of(tokens, parents, depths, scores, ranks)


def _offers(edges: NDArray[np.float32], logprobs: NDArray[np.float32]) -> Offers:
    order = np.argsort(-edges, axis=1, kind="stable")
    table: Offers = []
    for columns, row, finite in zip(
        order.tolist(), edges.tolist(), np.isfinite(logprobs).tolist(), strict=True
    ):
        table.append([(row[column], column) for column in columns if finite[column]])
    return table


def _checked_budget(budget: int) -> int:
    if not isinstance(budget, (int, np.integer)) or isinstance(budget, bool) or budget < 0:
        raise TreeInputError(f"budget: found {budget!r}, allowed is a whole number of nodes, 0 or more")
    return int(budget)


def _checked_table(ids: Any, logprobs: Any) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids, logprobs = np.asarray(ids), np.asarray(logprobs)
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise TreeInputError(
            f"candidate table: found ids {_shape(ids.shape)} and logprobs {_shape(logprobs.shape)}, "
            "allowed are two arrays of one shape [F-1, K]"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise TreeInputError(f"candidate ids: found dtype {ids.dtype}, allowed are integers")
    if not np.issubdtype(logprobs.dtype, np.floating):
        raise TreeInputError(f"candidate logprobs: found dtype {logprobs.dtype}, allowed are floats")
    if ids.shape[0] and not ids.shape[1]:
        raise TreeInputError(
            f"candidate table: found {_shape(ids.shape)}, allowed is one candidate or more (K >= 1)"
        )
    bad = ~(logprobs <= LOGPROB_SLACK)  # NaN as well
    if bad.any():
        depth, rank = np.argwhere(bad)[0].tolist()
        raise TreeInputError(
            f"logprobs[{depth}, {rank}]: found {logprobs[depth, rank]}, allowed are numbers <= 0 and -inf"
        )
    return ids.astype(np.int64), np.minimum(logprobs.astype(np.float32), np.float32(0.0))


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
