"""Which drafted tokens the target agrees with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.nodes import Tree
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Accepted:
    """The walked path (node indices, root first) and the target's own token after its last node."""

    path: tuple[int, ...]
    bonus: int

    @property
    def matched(self) -> int:
        """Accepted drafts: nodes of the path without the root."""
        return len(self.path) - 1

    @property
    def accept_length(self) -> int:
        """Tokens this step emits: matched drafts and the bonus token."""
        return len(self.path)


def walk(tree: Tree, node_tokens: ArrayLike) -> Accepted:
    """Walk from the root to the child that carries the target's token, as long as there is one.

    node_tokens  int[Q]: the target's choice after every node, given the node's ancestors: the argmax
                 at T=0, one sample per node from the target's own distribution at T>0. Either way
                 every emitted token is exactly what the target would have emitted (sample and match,
                 as DDTree does, arXiv 2604.12989).

    Of two siblings with one token the first is taken. Raises `TreeInputError` for a wrong shape.
    """
    wanted = np.asarray(node_tokens)
    if wanted.shape != (tree.width,):
        raise TreeInputError(f"node_tokens: found shape {list(wanted.shape)}, allowed is [{tree.width}]")
    choices = wanted.tolist()
    path = [0]
    # Parents come before children, so one pass in index order visits a path in order.
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == path[-1] and token == choices[parent]:
            path.append(node)
    return Accepted(tuple(path), choices[path[-1]])


def chain_accept(chain_tokens: Iterable[int], truth_tokens: Iterable[int]) -> int:
    """Matched drafts of a chain (without its root) against the tokens really produced after the root."""
    matched = 0
    for drafted, real in zip(chain_tokens, truth_tokens, strict=False):
        if drafted != real:
            break
        matched += 1
    return matched


def tree_accept(tree: Tree, truth_tokens: Sequence[int]) -> int:
    """Matched drafts of a tree against the tokens really produced after its root."""
    truth = [int(token) for token in truth_tokens]
    last, matched = 0, 0
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == last and matched < len(truth) and token == truth[matched]:
            last = node
            matched += 1
    return matched
