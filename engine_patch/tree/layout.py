"""What a verify pass needs to know about a tree: masks, positions, links, orders and encodings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.nodes import Ints, Tree
from numpy.typing import ArrayLike, NDArray


def ancestor_mask(tree: Tree) -> NDArray[np.bool_]:
    """bool[Q, Q]: row i is True at i and at every ancestor of i."""
    mask = np.eye(tree.width, dtype=np.bool_)
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def positions(tree: Tree, prefix_len: int) -> Ints:
    """int64[Q]: sequence positions when `prefix_len` tokens come before the root; siblings share one."""
    return tree.depths + np.int64(prefix_len)


def links(tree: Tree) -> tuple[Ints, Ints]:
    """(first_child, next_sibling), int64[Q] each, -1 for none; siblings are linked by ascending index."""
    first_child = np.full(tree.width, -1, dtype=np.int64)
    next_sibling = np.full(tree.width, -1, dtype=np.int64)
    for node in range(tree.width - 1, 0, -1):
        parent = tree.parents[node]
        next_sibling[node] = first_child[parent]
        first_child[parent] = node
    return first_child, next_sibling


@dataclass(frozen=True, eq=False)
class SglangEncoding:
    """A tree of Q rows as SGLang's `build_tree_kernel_efficient` reads it.

    tokens          int64[Q], root first
    selected_index  int64[Q-1], `parent * Q + node` for node 1..Q-1
    parent_list     int64[Q+1], [-1, selected_index..., -1]
    topk, depth     the two numbers to call it with
    """

    tokens: Ints
    selected_index: Ints
    parent_list: Ints
    topk: int
    depth: int


def sglang_encoding(tree: Tree, width: int) -> SglangEncoding:
    """Encode for SGLang's tree builder at verify width `width` >= Q.

    Any parents-before-children tree passes: that builder divides `selected_index` by `topk` to find a
    parent's place in `parent_list`, whose entry it then looks up in `selected_index`; with `topk` = width
    both steps are the identity. Missing rows become further children of the root with the root's token.
    Such a row is a valid draft, so a match with it is right as well; it only costs its share of the pass.
    """
    if width < max(tree.width, 1):
        raise TreeInputError(f"width: found {width}, allowed is {tree.width} (the tree's) or more")
    padding = width - tree.width
    tokens = np.concatenate([tree.tokens, np.full(padding, tree.tokens[0], dtype=np.int64)])
    parents = np.concatenate([tree.parents, np.zeros(padding, dtype=np.int64)])
    selected = parents[1:] * width + np.arange(1, width, dtype=np.int64)
    edge = np.full(1, -1, dtype=np.int64)
    return SglangEncoding(tokens, selected, np.concatenate([edge, selected, edge]), topk=width, depth=2)


def dfs_order(tree: Tree) -> Ints:
    """int64[Q] permutation: entry n is the old index of the n-th node in depth-first order.

    Siblings keep their order. A chain of first children is then contiguous, so a scan along rows reloads
    state at branches only.
    """
    first_child, next_sibling = (link.tolist() for link in links(tree))
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        if next_sibling[node] >= 0:
            stack.append(next_sibling[node])
        if first_child[node] >= 0:
            stack.append(first_child[node])
    return np.asarray(order, dtype=np.int64)


def reorder(tree: Tree, permutation: ArrayLike) -> Tree:
    """The same tree with node n taken from old index `permutation[n]`.

    Raises `TreeInputError` unless it is a permutation that keeps the root first and parents before children.
    """
    order = np.asarray(permutation, dtype=np.int64)
    if order.shape != (tree.width,) or not np.array_equal(np.sort(order), np.arange(tree.width)):
        raise TreeInputError(
            f"permutation: found {order.tolist()}, allowed is an order of 0..{tree.width - 1}"
        )
    new_index = np.empty(tree.width, dtype=np.int64)
    new_index[order] = np.arange(tree.width)
    parents = np.where(tree.parents[order] < 0, -1, new_index[tree.parents[order]])
    if (parents >= np.arange(tree.width)).any() or order[0] != 0:
        raise TreeInputError(
            f"permutation: found {order.tolist()}, allowed is one with parents before children"
        )
    return Tree(tree.tokens[order], parents, tree.depths[order], tree.scores[order], tree.ranks[order])
