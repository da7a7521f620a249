"""Fits the chance that a drafted token is right given that its path was: two ridged logistic regressions.

Model (the format is the engine's, `ddtree_engine.tree.calibration`): on the spine and off it, each with its
own numbers,

    p(right | path right) = sigmoid(depth[d-1] + rank[r] + slope * max(logprob, floor))

Examples come from logged steps: the tokens that were really produced are walked down the candidate table as
long as they are among its top K. Every depth that is reached gives K examples, one per rank, of which at most
one is right; they belong to the spine while all ranks so far are 0. The fit is Newton's method with step
halving on the log-loss plus a ridge. The ridge ties neighbouring depths and ranks to each other rather than
to zero, since a depth that was seldom reached should take after its neighbours, and the slope to 1, where a
log-probability counts as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOGPROB_FLOOR = -12.0
RIDGE_NEIGHBOUR = 4.0
RIDGE_LEVEL = 1e-2
MAX_ITERATIONS = 100
TOLERANCE = 1e-8

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One verify step: candidates ids and logprobs [F-1, K], and the tokens produced after its root."""

    ids: Ints
    logprobs: Floats
    truth: tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    """One example per candidate of every depth that was reached; arrays of one length.

    depth  0-based position after the root;  label  1.0 where the candidate is the token produced
    """

    depth: Ints
    rank: Ints
    logprob: Floats
    label: Floats

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Table:
    """One side's fitted numbers."""

    depth: Floats
    rank: Floats
    slope: float

    def chance(self, examples: Examples) -> Floats:
        """Predicted p(right | path right) of every example."""
        floored = np.maximum(examples.logprob, LOGPROB_FLOOR)
        return _sigmoid(self.depth[examples.depth] + self.rank[examples.rank] + self.slope * floored)


def collect_examples(steps: Sequence[Step]) -> tuple[Examples, Examples]:
    """Examples on the spine and off it."""
    on: list[tuple[int, Floats, int]] = []
    off: list[tuple[int, Floats, int]] = []
    for step in steps:
        for depth, on_spine, rank in walk_truth(step):
            (on if on_spine else off).append((depth, step.logprobs[depth], rank))
    return _examples(on), _examples(off)


def walk_truth(step: Step) -> Iterator[tuple[int, bool, int]]:
    """(depth, on the spine, rank of the truth or -1) as far down as the truth stays in the table."""
    on_spine = True
    for depth, token in enumerate(step.truth[: len(step.ids)]):
        found = np.flatnonzero(step.ids[depth] == token)
        rank = int(found[0]) if len(found) else -1
        yield depth, on_spine, rank
        if rank < 0:
            return
        on_spine = on_spine and rank == 0


def fit_table(examples: Examples, positions: int, topk: int) -> Table:
    """Fit one side. Without examples it is the raw log-probability's own chance at slope 1.

    positions  F-1;  topk  K
    """
    size = positions + topk + 1
    penalty, centre = _ridge(positions, topk)
    weights = centre.copy()
    if not len(examples):
        return _table(weights, positions, topk)
    floored = np.maximum(examples.logprob, LOGPROB_FLOOR)
    value = _loss(weights, examples, floored, penalty, centre, positions, topk)
    for _ in range(MAX_ITERATIONS):
        chance = _sigmoid(_scores(weights, examples, floored, positions, topk))
        gradient = penalty @ (weights - centre)
        residual = chance - examples.label
        gradient += _scatter(residual, examples, floored, positions, topk, size)
        hessian = penalty + _curvature(chance * (1 - chance), examples, floored, positions, topk, size)
        step = np.linalg.solve(hessian, gradient)
        decrement = float(gradient @ step)
        if decrement < TOLERANCE * len(examples):
            break
        scale = 1.0
        while True:
            trial = weights - scale * step
            lower = _loss(trial, examples, floored, penalty, centre, positions, topk)
            if lower <= value - 1e-4 * scale * decrement or scale < 1e-6:
                break
            scale /= 2
        weights, value = trial, lower
    return _table(weights, positions, topk)


def log_loss(chance: Floats, label: Floats) -> float:
    """Mean negative log-likelihood in nats."""
    safe = np.clip(chance, 1e-12, 1 - 1e-12)
    return float(-np.mean(label * np.log(safe) + (1 - label) * np.log1p(-safe)))


def reliability(chance: Floats, label: Floats, bins: int = 10) -> list[dict[str, float]]:
    """Predicted against observed by equal-width bins of the prediction; empty bins are left out."""
    place = np.minimum((chance * bins).astype(int), bins - 1)
    return [
        {
            "low": index / bins,
            "high": (index + 1) / bins,
            "examples": int(mask.sum()),
            "predicted": float(chance[mask].mean()),
            "observed": float(label[mask].mean()),
        }
        for index in range(bins)
        if (mask := place == index).any()
    ]


def _examples(found: list[tuple[int, Floats, int]]) -> Examples:
    """Examples of (depth, the depth's log-probabilities, rank of the truth or -1); -inf is no candidate."""
    if not found:
        empty = np.zeros(0)
        return Examples(empty.astype(np.int64), empty.astype(np.int64), empty, empty)
    logprob = np.stack([row for _, row, _ in found])
    depth = np.repeat(np.array([[depth] for depth, _, _ in found]), logprob.shape[1], axis=1)
    rank = np.broadcast_to(np.arange(logprob.shape[1]), logprob.shape)
    label = (rank == np.array([[rank] for _, _, rank in found])).astype(np.float64)
    real = np.isfinite(logprob)
    return Examples(depth[real], rank[real], logprob[real], label[real])


def _ridge(positions: int, topk: int) -> tuple[Floats, Floats]:
    """The penalty matrix and its centre (slope 1, all else 0)."""
    size = positions + topk + 1
    penalty = RIDGE_LEVEL * np.eye(size)
    for start, count in ((0, positions), (positions, topk)):
        for first in range(start, start + count - 1):
            pair = np.zeros(size)
            pair[first], pair[first + 1] = 1.0, -1.0
            penalty += RIDGE_NEIGHBOUR * np.outer(pair, pair)
    centre = np.zeros(size)
    centre[-1] = 1.0
    return penalty, centre


def _table(weights: Floats, positions: int, topk: int) -> Table:
    return Table(weights[:positions], weights[positions : positions + topk], float(weights[-1]))


def _scores(weights: Floats, examples: Examples, floored: Floats, positions: int, topk: int) -> Floats:
    table = _table(weights, positions, topk)
    return table.depth[examples.depth] + table.rank[examples.rank] + table.slope * floored


def _loss(
    weights: Floats,
    examples: Examples,
    floored: Floats,
    penalty: Floats,
    centre: Floats,
    positions: int,
    topk: int,
) -> float:
    scores = _scores(weights, examples, floored, positions, topk)
    off = weights - centre
    return float(np.sum(np.logaddexp(0.0, scores) - examples.label * scores) + 0.5 * off @ penalty @ off)


def _scatter(
    residual: Floats, examples: Examples, floored: Floats, positions: int, topk: int, size: int
) -> Floats:
    """X^T residual for the design with one-hot depth, one-hot rank and the log-probability."""
    gradient = np.zeros(size)
    gradient[:positions] = np.bincount(examples.depth, residual, positions)
    gradient[positions : positions + topk] = np.bincount(examples.rank, residual, topk)
    gradient[-1] = residual @ floored
    return gradient


def _curvature(
    weight: Floats, examples: Examples, floored: Floats, positions: int, topk: int, size: int
) -> Floats:
    """X^T diag(weight) X, from sums over (depth, rank) cells."""
    cell = examples.depth * topk + examples.rank
    shape = (positions, topk)
    plain = np.bincount(cell, weight, positions * topk).reshape(shape)
    times = np.bincount(cell, weight * floored, positions * topk).reshape(shape)
    hessian = np.zeros((size, size))
    depths, ranks = slice(0, positions), slice(positions, positions + topk)
    hessian[depths, depths] = np.diag(plain.sum(axis=1))
    hessian[ranks, ranks] = np.diag(plain.sum(axis=0))
    hessian[depths, ranks], hessian[ranks, depths] = plain, plain.T
    hessian[depths, -1] = hessian[-1, depths] = times.sum(axis=1)
    hessian[ranks, -1] = hessian[-1, ranks] = times.sum(axis=0)
    hessian[-1, -1] = weight @ (floored * floored)
    return hessian


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
