"""Candidate tables and calibrations for the tree's property tests."""

from __future__ import annotations

import numpy as np
from ddtree_engine.tree import Calibration, parse_calibration
from hypothesis import strategies as st


@st.composite
def tables(draw, max_positions=4, max_topk=3, coarse=True, sort=True):
    """(ids, logprobs) with K distinct ids per row. Coarse log-probabilities make ties common."""
    positions = draw(st.integers(1, max_positions))
    topk = draw(st.integers(1, max_topk))
    grid = st.integers(0, 6).map(lambda n: -n / 2) if coarse else st.floats(-20, 0, width=32)
    value = st.one_of(grid, st.just(-np.inf))
    rows = draw(
        st.lists(st.lists(value, min_size=topk, max_size=topk), min_size=positions, max_size=positions)
    )
    logprobs = np.asarray(rows, dtype=np.float32)
    if sort:
        logprobs = -np.sort(-logprobs, axis=1)
    ids = np.stack([np.asarray(draw(st.permutations(range(8))))[:topk] for _ in range(positions)])
    return ids, logprobs


def random_table(rng: np.random.Generator, positions: int, topk: int, vocabulary: int = 1000):
    """A table as a drafter gives it: sorted columns, distinct ids."""
    probabilities = rng.dirichlet(np.full(vocabulary, 0.05), size=positions) + 1e-12
    ids = np.argsort(-probabilities, axis=1)[:, :topk]
    return ids, np.log(np.take_along_axis(probabilities, ids, axis=1)).astype(np.float32)


def calibration_data(block=16, topk=16, **changes):
    """The JSON of a plausible calibration; keyword arguments replace top-level keys."""

    def side(base, slope):
        return {
            "depth": [base - 0.1 * d for d in range(block - 1)],
            "rank": [-0.7 * r for r in range(topk)],
            "slope": slope,
        }

    data = {
        "schema": 1,
        "kind": "ddtree-calibration",
        "block": block,
        "topk": topk,
        "logprob_floor": -12.0,
        "on": side(2.0, 0.6),
        "off": side(-1.0, 0.4),
        "fit": {"steps": 1000},
    }
    return data | changes


def calibration(block=16, topk=16, **changes) -> Calibration:
    return parse_calibration(calibration_data(block, topk, **changes))
