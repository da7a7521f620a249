"""The accept walk in torch, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_walk_naive(
    tokens: Tensor, parents: Tensor, node_tokens: Tensor, max_path: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk every tree from its root to the child that carries the target's token, as long as there is one.

    tokens, parents  int[N, Q];  node_tokens  int[N, Q], the target's choice after every node: the argmax, or
                     one sample per node. max_path  rows a path can have, at least the tree's depth + 1

    Returns path int64[N, max_path] (row indices from the root, -1 after the end), counts int64[N]
    (accepted rows, root included), bonus int64[N] (the target's own token after the last of them),
    leaf int64[N] (its row).
    Of two siblings with one token the first is taken.
    """
    batch, width = tokens.shape
    path = torch.full((batch, max_path), -1, dtype=torch.int64)
    counts, bonus, leaf = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
    for request in range(batch):
        node, steps = 0, [0]
        for row in range(1, width):
            if parents[request, row] == node and tokens[request, row] == node_tokens[request, node]:
                node = row
                steps.append(row)
        steps = steps[:max_path]
        path[request, : len(steps)] = torch.tensor(steps)
        counts[request], leaf[request] = len(steps), steps[-1]
        bonus[request] = node_tokens[request, steps[-1]]
    return path, counts, bonus, leaf
