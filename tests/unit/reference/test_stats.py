"""Scoring of steps against the output."""

from __future__ import annotations

import numpy as np
from ddtree_engine.reference.stats import StepRecord, score
from ddtree_engine.tree import build_tree

IDS = np.array([[1, 5], [2, 6], [3, 7]])
LOGPROBS = np.log(np.array([[0.6, 0.4], [0.6, 0.4], [0.6, 0.4]], dtype=np.float32))


def step(anchor, matched, budget=None):
    tree = None if budget is None else build_tree(0, IDS, LOGPROBS, budget)
    return StepRecord(anchor, IDS, LOGPROBS, tree, matched)


def test_a_step_below_its_own_chain_is_counted():
    scores = score([step(0, 1), step(0, 2)], [9, 1, 2, 8, 8])
    assert (scores.scored, scores.below_spine) == (2, 1)
    assert scores.spine_accept_length == 3.0


def test_tokens_that_were_never_produced_are_not_held_against_a_step():
    # The chain would match all three, the output shows two of them.
    scores = score([step(0, 2)], [9, 1, 2])
    assert (scores.scored, scores.below_spine) == (1, 0)
    assert scores.spine_accept_length == 2.0


def test_a_step_whose_anchor_ends_the_output_is_not_scored():
    scores = score([step(2, 3), step(5, 3)], [9, 1, 2])
    assert (scores.scored, scores.spine_accept_length) == (0, None)


def test_a_tree_is_scored_along_the_tokens_produced():
    scores = score([step(0, 0, budget=14), step(0, 0, budget=1)], [9, 5, 2, 7, 4, 4])
    assert scores.tree_histogram == [1, 0, 0, 1]
    assert scores.tree_accept_length == (4 + 1) / 2
    assert scores.spine_accept_length == 1.0
