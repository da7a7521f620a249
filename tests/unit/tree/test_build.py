from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from ddtree_engine.tree import (
    Builder,
    TreeInputError,
    build_tree,
    chain_accept,
    chain_tree,
    tree_accept,
)
from hypothesis import given
from hypothesis import strategies as st

from .strategies import calibration, random_table, tables

PLAIN = [Builder.BEST_FIRST, Builder.SPINE_FIRST]


def node_paths(tree):
    """Every node as the tuple of its ranks from the root."""
    paths = [()]
    for parent, rank in zip(tree.parents.tolist()[1:], tree.ranks.tolist()[1:], strict=True):
        paths.append((*paths[parent], rank))
    return paths


def all_prefixes(edge):
    """{rank path: float32 score} of every possible prefix; `edge(path)` is the last edge's score or -inf."""
    scores = {(): np.float32(0.0)}
    level = [()]
    while level:
        grown = []
        for path in level:
            for child in edge(path):
                score = np.float32(scores[path] + child[1])
                if score > -np.inf:
                    scores[(*path, child[0])] = score
                    grown.append((*path, child[0]))
        level = grown
    return scores


def plain_edges(logprobs):
    def edge(path):
        return list(enumerate(logprobs[len(path)])) if len(path) < len(logprobs) else []

    return edge


def most_probable(scores, budget):
    return sorted((float(s) for path, s in scores.items() if path), reverse=True)[:budget]


@given(tables(), st.integers(0, 40))
def test_best_first_holds_the_most_probable_prefixes(table, budget):
    ids, logprobs = table
    tree = build_tree(7, ids, logprobs, budget)
    scores = all_prefixes(plain_edges(logprobs))
    assert tree.scores[1:].tolist() == most_probable(scores, budget)
    for path, score in zip(node_paths(tree), tree.scores.tolist(), strict=True):
        assert score == scores[path]


@given(tables(max_positions=5, coarse=False), st.integers(0, 60))
def test_ties_broken_as_documented_give_one_tree(table, budget):
    """A second implementation of the documented order: a scan over all open offers, no queue."""
    ids, logprobs = table
    tree = build_tree(7, ids, logprobs, budget)
    parents, scores, ranks, depths = [-1], [np.float32(0)], [0], [0]
    taken = {0: 0}
    while len(parents) <= budget:
        best = None
        for parent, depth in enumerate(depths):
            if depth == len(ids):
                continue
            order = sorted(range(ids.shape[1]), key=lambda r, d=depth: (-logprobs[d, r], r))
            order = [r for r in order if logprobs[depth, r] > -np.inf][taken[parent] :]
            if order:
                score = np.float32(scores[parent] + logprobs[depth, order[0]])
                if best is None or score > best[0]:
                    best = (score, parent, order[0])
        if best is None:
            break
        taken[best[1]] += 1
        taken[len(parents)] = 0
        parents.append(best[1])
        scores.append(best[0])
        ranks.append(best[2])
        depths.append(depths[best[1]] + 1)
    assert tree.parents.tolist() == parents
    assert tree.ranks.tolist() == ranks


@given(tables(max_positions=6, max_topk=4), st.integers(0, 60), st.sampled_from(list(Builder)))
def test_every_tree_is_prefix_closed_with_parents_first(table, budget, builder):
    ids, logprobs = table
    fitted = calibration() if builder is Builder.CALIBRATED else None
    tree = build_tree(7, ids, logprobs, budget, builder, fitted)
    assert tree.width <= budget + 1
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.scores[0], tree.ranks[0]) == (
        7,
        -1,
        0,
        0,
        0,
    )
    for node in range(1, tree.width):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.tokens[node] == ids[tree.depths[parent], tree.ranks[node]]
        assert tree.scores[node] <= tree.scores[parent]
    assert len(set(node_paths(tree))) == tree.width, "a prefix twice"


@given(tables(max_positions=6, max_topk=4), st.integers(0, 60), st.data())
def test_spine_first_accepts_at_least_the_chain(table, budget, data):
    ids, logprobs = table
    positions, topk = ids.shape
    truth_ranks = data.draw(st.lists(st.integers(0, topk), min_size=positions, max_size=positions))
    truth = [99 if rank == topk else int(ids[d, rank]) for d, rank in enumerate(truth_ranks)]
    spine_first = build_tree(7, ids, logprobs, budget, Builder.SPINE_FIRST)
    chain = chain_tree(7, ids, logprobs, budget)
    assert tree_accept(spine_first, truth) >= chain_accept(chain.tokens[1:].tolist(), truth)
    length = chain.width
    assert spine_first.tokens[:length].tolist() == chain.tokens.tolist()
    assert spine_first.parents[:length].tolist() == list(range(-1, length - 1))


@given(tables(max_positions=4), st.integers(0, 40))
def test_spine_first_completes_the_spine_with_the_best_of_the_rest(table, budget):
    ids, logprobs = table
    tree = build_tree(7, ids, logprobs, budget, Builder.SPINE_FIRST)
    scores = all_prefixes(plain_edges(logprobs))
    spine = [tuple([0] * d) for d in range(1, len(ids) + 1) if tuple([0] * d) in scores][:budget]
    rest = {path: score for path, score in scores.items() if path not in spine}
    assert node_paths(tree)[1 : len(spine) + 1] == spine
    assert tree.scores[len(spine) + 1 :].tolist() == most_probable(rest, budget - len(spine))


@given(tables(max_positions=4), st.integers(0, 40), st.floats(-1, 1), st.floats(-2, 2))
def test_calibrated_holds_the_best_prefixes_by_calibrated_score(table, budget, slope, rank_bias):
    """Ranks may swap places under a calibration, so siblings are not in column order here."""
    ids, logprobs = table
    side = {"depth": [0.5, -0.5, 0.0, 1.0], "rank": [0.0, rank_bias, 0.3], "slope": slope}
    off = {"depth": [-0.5, -1.0, -1.0, 0.0], "rank": [0.1, 0.0, rank_bias], "slope": 0.2}
    fitted = calibration(5, 3, on=side, off=off)
    tree = build_tree(7, ids, logprobs, budget, Builder.CALIBRATED, fitted)
    on, off_scores = (fitted.edge_scores(logprobs, on_spine=spine) for spine in (True, False))

    def edge(path):
        if len(path) == len(ids):
            return []
        return list(enumerate((off_scores if any(path) else on)[len(path)]))

    scores = all_prefixes(edge)
    assert tree.scores[1:].tolist() == most_probable(scores, budget)
    for path, score in zip(node_paths(tree), tree.scores.tolist(), strict=True):
        assert score == scores[path]


@pytest.mark.parametrize("builder", PLAIN)
def test_a_budget_of_zero_gives_the_root_alone(builder):
    ids, logprobs = random_table(np.random.default_rng(0), 15, 16)
    tree = build_tree(7, ids, logprobs, 0, builder)
    assert tree.tokens.tolist() == [7]
    assert tree.parents.tolist() == [-1]


@pytest.mark.parametrize("budget", [-1, 2.5, True, math.nan])
def test_a_budget_that_is_no_count_is_refused(budget):
    ids, logprobs = random_table(np.random.default_rng(0), 15, 16)
    with pytest.raises(TreeInputError, match="budget: found"):
        build_tree(7, ids, logprobs, budget)


@pytest.mark.parametrize("builder", PLAIN)
def test_one_candidate_per_position_gives_the_chain(builder):
    ids, logprobs = random_table(np.random.default_rng(0), 15, 1)
    tree = build_tree(7, ids, logprobs, 63, builder)
    assert tree.parents.tolist() == list(range(-1, 15))
    assert tree.tokens[1:].tolist() == ids[:, 0].tolist()


@pytest.mark.parametrize("builder", PLAIN)
def test_a_budget_over_the_whole_table_gives_the_whole_table(builder):
    ids, logprobs = random_table(np.random.default_rng(0), 3, 3)
    tree = build_tree(7, ids, logprobs, 1000, builder)
    assert sorted(node_paths(tree)[1:]) == sorted(
        path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)
    )


@pytest.mark.parametrize("builder", PLAIN)
def test_columns_past_the_vocabulary_are_never_chosen(builder):
    """A vocabulary of 2 padded to K = 4 with -inf."""
    ids = np.asarray([[0, 1, -1, -1]] * 3)
    logprobs = np.asarray([[-0.5, -1.0, -np.inf, -np.inf]] * 3)
    tree = build_tree(7, ids, logprobs, 1000, builder)
    assert tree.width == 1 + 2 + 4 + 8
    assert set(tree.tokens[1:].tolist()) == {0, 1}


@pytest.mark.parametrize("builder", PLAIN)
def test_an_impossible_spine_token_ends_the_spine(builder):
    ids = np.asarray([[1, 2], [3, 4], [5, 6]])
    logprobs = np.asarray([[-0.1, -3.0], [-np.inf, -np.inf], [-0.1, -0.2]])
    assert build_tree(7, ids, logprobs, 9, builder).tokens.tolist() == [7, 1, 2]


def test_no_candidate_at_all_gives_the_root_alone():
    assert build_tree(7, np.asarray([[1, 2]]), np.full((1, 2), -np.inf), 9).width == 1


def test_equal_scores_go_to_the_lower_parent_then_the_lower_column():
    ids = np.arange(9).reshape(3, 3)
    tree = build_tree(99, ids, np.zeros((3, 3)), 5)
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1]
    assert tree.ranks.tolist() == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_numbers_that_are_no_log_probabilities_are_refused(bad):
    logprobs = np.full((2, 3), -1.0)
    logprobs[1, 2] = bad
    with pytest.raises(TreeInputError, match=r"logprobs\[1, 2\]: found"):
        build_tree(7, np.arange(6).reshape(2, 3), logprobs, 5)


def test_a_log_probability_rounded_above_zero_counts_as_zero():
    tree = build_tree(7, np.asarray([[1]]), np.asarray([[1e-6]]), 1)
    assert tree.scores.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("builder", PLAIN)
def test_a_block_of_one_drafts_nothing(builder):
    assert build_tree(7, np.zeros((0, 16), np.int64), np.zeros((0, 16)), 63, builder).width == 1


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        (np.zeros((2, 3), np.int64), np.zeros((3, 2)), r"found ids \[2, 3\] and logprobs \[3, 2\]"),
        (np.zeros(3, np.int64), np.zeros(3), r"one shape \[F-1, K\]"),
        (np.zeros((2, 3)), np.zeros((2, 3)), "ids: found dtype float64"),
        (np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64), "logprobs: found dtype int64"),
        (np.zeros((2, 0), np.int64), np.zeros((2, 0)), "one candidate or more"),
    ],
)
def test_tables_of_wrong_shape_or_dtype_are_refused(ids, logprobs, message):
    with pytest.raises(TreeInputError, match=message):
        build_tree(7, ids, logprobs, 5)


def test_a_calibration_goes_with_its_builder_only():
    ids, logprobs = random_table(np.random.default_rng(0), 15, 16)
    with pytest.raises(TreeInputError, match="calibration missing"):
        build_tree(7, ids, logprobs, 5, Builder.CALIBRATED)
    with pytest.raises(TreeInputError, match="calibration given"):
        build_tree(7, ids, logprobs, 5, Builder.BEST_FIRST, calibration())


def test_the_same_table_gives_the_same_tree_twice():
    ids, logprobs = random_table(np.random.default_rng(1), 15, 16)
    once, twice = (build_tree(7, ids, logprobs, 63) for _ in range(2))
    assert once.parents.tolist() == twice.parents.tolist()
    assert once.tokens.tolist() == twice.tokens.tolist()


def test_building_a_wide_tree_takes_next_to_no_time():
    """About 0.1 ms where it was measured; a step of a real model takes tens of milliseconds."""
    ids, logprobs = random_table(np.random.default_rng(1), 15, 16)
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        build_tree(7, ids, logprobs, 63)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-2
