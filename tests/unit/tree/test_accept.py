from __future__ import annotations

import numpy as np
import pytest
from ddtree_engine.tree import TreeInputError, chain_accept, tree_accept, tree_of, walk
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def token_trees(draw):
    """Trees over a vocabulary of three, so that walks go deep and siblings may repeat a token."""
    width = draw(st.integers(1, 16))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, width)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = draw(st.lists(st.integers(0, 2), min_size=width, max_size=width))
    return tree_of(tokens, parents, depths, [0.0] * width, [0] * width)


def walk_by_hand(tree, choice):
    """From the root, one child lookup at a time."""
    node, path = 0, [0]
    while True:
        children = [
            child
            for child in range(1, tree.width)
            if tree.parents[child] == node and tree.tokens[child] == choice(node)
        ]
        if not children:
            return tuple(path), choice(node)
        node = children[0]
        path.append(node)


@given(token_trees(), st.data())
def test_walk_follows_the_target_token_from_node_to_child(tree, data):
    wanted = data.draw(st.lists(st.integers(0, 3), min_size=tree.width, max_size=tree.width))
    accepted = walk(tree, wanted)
    assert (accepted.path, accepted.bonus) == walk_by_hand(tree, lambda node: wanted[node])
    assert accepted.matched == len(accepted.path) - 1
    assert accepted.accept_length == accepted.matched + 1


@given(token_trees(), st.lists(st.integers(0, 3), max_size=12))
def test_tree_accept_counts_the_longest_drafted_prefix_of_the_truth(tree, truth):
    def drafted(prefix):
        nodes = {0}
        for token in prefix:
            nodes = {n for n in range(1, tree.width) if tree.parents[n] in nodes and tree.tokens[n] == token}
        return bool(nodes)

    first_only = len({(p, t) for p, t in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)})
    if first_only == tree.width:  # distinct siblings, as builders make them
        longest = max(n for n in range(len(truth) + 1) if drafted(truth[:n]))
        assert tree_accept(tree, truth) == longest


@pytest.mark.parametrize(
    ("chain", "truth", "matched"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [], 0),
        ([], [1], 0),
        ([1, 2], [1], 1),
    ],
)
def test_chain_accept_counts_up_to_the_first_difference(chain, truth, matched):
    assert chain_accept(chain, truth) == matched


def test_a_walk_needs_one_token_per_node():
    tree = tree_of([1, 2], [-1, 0], [0, 1], [0, 0], [0, 0])
    with pytest.raises(TreeInputError, match=r"node_tokens: found shape \[3\], allowed is \[2\]"):
        walk(tree, np.zeros(3, dtype=np.int64))


def test_the_spine_is_the_chain_of_first_ranks():
    tree = tree_of([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2], [0] * 5, [0, 0, 1, 0, 0])
    assert tree.spine().tolist() == [0, 1, 3]
    assert (tree.width, tree.budget) == (5, 4)
