from __future__ import annotations

import numpy as np
import pytest
from ddtree_engine.tree import (
    TreeInputError,
    ancestor_mask,
    dfs_order,
    links,
    positions,
    reorder,
    sglang_encoding,
    tree_of,
)
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def trees(draw, max_width=24):
    """Any parents-before-children tree, builders or not."""
    width = draw(st.integers(1, max_width))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, width)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tree_of(list(range(100, 100 + width)), parents, depths, [0.0] * width, [0] * width)


def ancestors(tree, node):
    seen = []
    while node >= 0:
        seen.append(node)
        node = int(tree.parents[node])
    return seen


@given(trees(), st.integers(0, 1000))
def test_mask_and_positions_follow_the_ancestors(tree, prefix):
    mask = ancestor_mask(tree)
    for node in range(tree.width):
        path = ancestors(tree, node)
        assert np.flatnonzero(mask[node]).tolist() == sorted(path)
        assert positions(tree, prefix)[node] == prefix + len(path) - 1


@given(trees())
def test_links_list_every_child_once_in_order(tree):
    first_child, next_sibling = links(tree)
    for node in range(tree.width):
        children, child = [], first_child[node]
        while child != -1:
            children.append(int(child))
            child = next_sibling[child]
        assert children == np.flatnonzero(tree.parents == node).tolist()


def read_back(encoding, prefix):
    """The tree that SGLang 0.5.23's `build_tree_efficient` (full mask, one request) makes of an encoding."""
    selected, parent_list = encoding.selected_index.tolist(), encoding.parent_list.tolist()
    width = len(selected) + 1
    assert len(parent_list) == encoding.topk * (encoding.depth - 1) + 1

    def parent_row(node):
        place = selected[node - 1] // encoding.topk
        return 0 if place == 0 else selected.index(parent_list[place]) + 1

    mask = np.zeros((width, prefix + width), dtype=bool)
    mask[:, : prefix + 1] = True
    where, child, sibling = [prefix], [-1] * width, [-1] * width
    for node in range(width - 1, 0, -1):
        parent = parent_row(node)
        sibling[node], child[parent] = child[parent], node
    for node in range(1, width):
        row, steps = node, 0
        while True:
            steps += 1
            mask[node, prefix + row] = True
            if selected[row - 1] // encoding.topk == 0:
                break
            row = parent_row(row)
        where.append(prefix + steps)
    return mask[:, prefix:], where, child, sibling


@given(trees(), st.integers(0, 9), st.integers(0, 5))
def test_sglang_reads_the_encoded_tree_back(tree, prefix, padding):
    encoding = sglang_encoding(tree, tree.width + padding)
    mask, where, child, sibling = read_back(encoding, prefix)
    real = slice(0, tree.width)
    assert np.array_equal(mask[real, real], ancestor_mask(tree))
    assert where[real] == positions(tree, prefix).tolist()
    if not padding:
        assert child == links(tree)[0].tolist()
        assert sibling == links(tree)[1].tolist()
    assert encoding.tokens[real].tolist() == tree.tokens.tolist()
    for row in range(tree.width, tree.width + padding):
        assert where[row] == prefix + 1
        assert np.flatnonzero(mask[row]).tolist() == [0, row]


def test_a_width_below_the_tree_is_refused():
    tree = tree_of([1, 2], [-1, 0], [0, 1], [0, 0], [0, 0])
    with pytest.raises(TreeInputError, match="width: found 1"):
        sglang_encoding(tree, 1)


@given(trees())
def test_depth_first_order_keeps_the_tree_and_its_spines_contiguous(tree):
    order = dfs_order(tree)
    sorted_tree = reorder(tree, order)
    assert sorted_tree.tokens.tolist() == tree.tokens[order].tolist()
    first_child = links(tree)[0]
    for new, old in enumerate(order.tolist()):
        assert [int(order[n]) for n in ancestors(sorted_tree, new)] == ancestors(tree, old)
        if first_child[old] != -1:
            assert order[new + 1] == first_child[old]


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [0, 2, 1], [1, 0, 2]])
def test_orders_that_break_the_tree_are_refused(order):
    chain = tree_of([1, 2, 3], [-1, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 0])
    with pytest.raises(TreeInputError, match="permutation: found"):
        reorder(chain, order)
