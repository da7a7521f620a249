"""The tree itself: parallel arrays over its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of Q nodes; node 0 is the root (the bonus token) and parents come before their children.

    tokens   int64[Q], token ids
    parents  int64[Q], index of the parent, -1 for the root
    depths   int64[Q], edges from the root
    scores   float64[Q], the builder's log-score of the path, float32 values (see `ddtree_engine.tree.build`)
    ranks    int64[Q], column in the candidate table, 0 for the root
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    scores: Floats
    ranks: Ints

    @property
    def width(self) -> int:
        """Q: nodes including the root."""
        return len(self.tokens)

    @property
    def budget(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1

    def spine(self) -> Ints:
        """Indices of the nodes reached by rank 0 only, root first."""
        path = [0]
        parents, ranks = self.parents.tolist(), self.ranks.tolist()
        for node in range(1, self.width):
            if ranks[node] == 0 and parents[node] == path[-1]:
                path.append(node)
        return np.asarray(path, dtype=np.int64)


def tree_of(
    tokens: Sequence[int],
    parents: Sequence[int],
    depths: Sequence[int],
    scores: Sequence[float],
    ranks: Sequence[int],
) -> Tree:
    """A `Tree` from plain sequences."""
    return Tree(
        np.asarray(tokens, dtype=np.int64),
        np.asarray(parents, dtype=np.int64),
        np.asarray(depths, dtype=np.int64),
        np.asarray(scores, dtype=np.float64),
        np.asarray(ranks, dtype=np.int64),
    )
