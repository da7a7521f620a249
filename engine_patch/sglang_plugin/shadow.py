"""Shadow scoring: what the trees that were built beside a chain would have accepted.

A tree is scored against the tokens that the same request produced after the tree's root. That is exact for
this root; only which roots there were was decided by the chain, so the mean over steps is an estimate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ddtree_engine.tree.nodes import Tree

BUDGETS = (7, 15, 31, 63, 127)


def accepted_nodes(tree: Tree, truth: list[int]) -> list[int]:
    """Indices of the nodes below the root that a walk along `truth` accepts, in order."""
    path: list[int] = []
    last = 0
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if len(path) < len(truth) and parent == last and token == truth[len(path)] and node:
            path.append(node)
            last = node
    return path


@dataclass
class _Pending:
    tree: Tree
    chain_matched: int
    truth: list[int] = field(default_factory=list)


class ShadowScorer:
    """Collects steps by request and scores each as soon as its outcome is certain.

    Builders are nested: the tree of a smaller budget is the first nodes of the larger one, so one tree scores
    every budget up to its own.
    """

    def __init__(self, positions: int, budget: int) -> None:
        self.positions = positions
        self.budgets = [known for known in BUDGETS if known < budget] + [budget]
        self._pending: dict[str, deque[_Pending]] = {}
        self.scored = 0
        self.chain_matched = 0
        self.matched = dict.fromkeys(self.budgets, 0)
        self.histogram = [0] * (positions + 1)

    def step(self, rid: str, tree: Tree, committed: list[int]) -> None:
        """A step's tree and the tokens that it committed (matched drafts and the bonus token)."""
        pending = self._pending.setdefault(rid, deque())
        pending.append(_Pending(tree, len(committed) - 1))
        for waiting in pending:
            waiting.truth += committed[: self.positions - len(waiting.truth)]
        while pending and self._decided(pending[0]):
            self._score(pending.popleft())

    def finish(self, rid: str) -> None:
        """The request ended; steps whose outcome is still open are left out."""
        for waiting in self._pending.pop(rid, ()):
            if self._decided(waiting):
                self._score(waiting)

    def read(self) -> dict[str, Any]:
        """Totals and accept lengths by budget."""
        scored = self.scored
        lengths = (
            {str(budget): 1 + total / scored for budget, total in self.matched.items()} if scored else {}
        )
        return {
            "shadow_steps": scored,
            "shadow_accept_length": lengths,
            "shadow_histogram": list(self.histogram),
            "shadow_chain_accept_length": 1 + self.chain_matched / scored if scored else None,
        }

    def _decided(self, waiting: _Pending) -> bool:
        enough = len(waiting.truth) >= self.positions
        return enough or len(accepted_nodes(waiting.tree, waiting.truth)) < len(waiting.truth)

    def _score(self, waiting: _Pending) -> None:
        path = accepted_nodes(waiting.tree, waiting.truth)
        self.scored += 1
        self.chain_matched += waiting.chain_matched
        for budget in self.budgets:
            self.matched[budget] += sum(node <= budget for node in path)
        self.histogram[len(path)] += 1
