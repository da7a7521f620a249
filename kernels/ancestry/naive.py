"""Who is whose ancestor, in torch: the two index structures that every operation on a tree needs.

`parents` is int[N, Q] throughout: row i of a request names the row of its parent, and parents come before
their children. Row 0 is the root whatever its entry says (SGLang leaves it unset); any other negative entry
marks a row that continues the request's prefix directly, like another root (padding).

`arange(Q) - 1` is a chain: with it every operation here is the plain sequential one, and an engine that
passes it for a tree shares states between siblings, which is what the labelled `unsafe` ablation does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def chain_parents(batch: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """int64[batch, width]: every row continues the one before it."""
    return (torch.arange(width, device=device) - 1).expand(batch, width).contiguous()


def ancestor_mask(parents: Tensor) -> Tensor:
    """bool[N, Q, Q]: row i is True at i and at every ancestor of i. Pointer doubling, log2(Q) products."""
    batch, width = parents.shape
    rows = torch.arange(width, device=parents.device)
    link = ((parents[..., None] == rows) & (rows[:, None] > 0)) | (rows[:, None] == rows)
    reach = link.to(torch.float32)
    span = 1
    while span < width:
        reach = ((reach @ reach) > 0).to(torch.float32)
        span *= 2
    return reach.bool().expand(batch, width, width)


def ancestor_bits_naive(parents: Tensor) -> Tensor:
    """int32[N, Q, ceil(Q / 32)]: `ancestor_mask` packed, column j in bit j % 32 of word j // 32."""
    mask = ancestor_mask(parents)
    batch, width, _ = mask.shape
    words = (width + 31) // 32
    padded = torch.zeros(batch, width, words * 32, dtype=torch.int64, device=mask.device)
    padded[..., :width] = mask
    place = torch.arange(32, device=mask.device)
    value = (padded.view(batch, width, words, 32) << place).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


class DepthFirst(NamedTuple):
    """A walk over every row of a tree, parents before children and a first child right after its parent.

    order   int32[N, Q], the row of every step
    reload  int32[N, Q], where a step finds its parent's state: -2 the step before left it, -1 the prefix,
            otherwise the copy of this number
    keep    int32[N, Q], the number of the copy that a step leaves for later ones, -1 none; at most Q // 2
    """

    order: Tensor
    reload: Tensor
    keep: Tensor


def depth_first_naive(parents: Tensor) -> DepthFirst:
    """The walk that the scan form takes, children in row order; rows without a parent are roots."""
    batch, width = parents.shape
    walk = DepthFirst(*(torch.full((batch, width), -1, dtype=torch.int32) for _ in range(3)))
    for request, row_parents in enumerate(parents.tolist()):
        row_parents[0] = -1
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(row_parents):
            children.setdefault(max(parent, -1), []).append(row)
        copies = {row: n for n, row in enumerate(r for r in range(width) if len(children.get(r, [])) > 1)}
        stack, before = children[-1][::-1], None
        for step in range(width):
            row = stack.pop()
            stack += children.get(row, [])[::-1]
            parent = row_parents[row]
            walk.order[request, step] = row
            walk.keep[request, step] = copies.get(row, -1)
            if parent >= 0:
                walk.reload[request, step] = -2 if parent == before else copies[parent]
            before = row
    return walk


def depths(parents: Tensor) -> Tensor:
    """int64[N, Q]: edges from the row's root."""
    return ancestor_mask(parents).sum(-1) - 1


def window_index(parents: Tensor, window: int) -> Tensor:
    """int64[N, Q, window]: the last `window` inputs on every row's path, oldest first, itself last.

    Entries index the request's `window - 1` carried inputs (oldest first) followed by its Q rows.
    """
    carried = window - 1
    batch, width = parents.shape
    before = torch.arange(carried, device=parents.device) - 1
    root = (parents < 0) | (torch.arange(width, device=parents.device) == 0)
    own = torch.where(root, carried - 1, parents.long() + carried)
    previous = torch.cat([before.expand(batch, carried), own], dim=1)
    step = torch.arange(carried, carried + width, device=parents.device).expand(batch, width)
    steps = [step]
    for _ in range(carried):
        step = previous.gather(1, step)
        steps.append(step)
    return torch.stack(steps[::-1], dim=-1)
