"""Random trees and their paths, for checks that must hold for any tree."""

from __future__ import annotations

import numpy as np
from ddtree_engine.tree.nodes import Ints, Tree


def random_tree(rng: np.random.Generator, width: int, depth: int) -> tuple[Ints, Ints]:
    """(parents, depths) int64[width] of a random tree whose paths have at most `depth` nodes."""
    parents, depths = np.full(width, -1, dtype=np.int64), np.zeros(width, dtype=np.int64)
    for node in range(1, width):
        open_nodes = np.flatnonzero(depths[:node] < depth - 1)
        # Half the nodes continue the newest branch: long paths and bushes alike.
        parent = open_nodes[-1] if rng.random() < 0.5 else rng.choice(open_nodes)
        parents[node], depths[node] = parent, depths[parent] + 1
    return parents, depths


def path_of(parents: Ints, node: int) -> list[int]:
    """Node indices from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def leaves_of(parents: Ints, count: int) -> list[int]:
    """Up to `count` leaves, the newest first."""
    inner = set(parents.tolist())
    return [node for node in range(len(parents) - 1, 0, -1) if node not in inner][:count]


def tree_with(tokens: Ints, parents: Ints, depths: Ints) -> Tree:
    """The tree of these tokens, with no scores: what a verify pass needs and a builder would not give."""
    return Tree(tokens, parents, depths, np.zeros(len(tokens)), np.zeros(len(tokens), dtype=np.int64))
