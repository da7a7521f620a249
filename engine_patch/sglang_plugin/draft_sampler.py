"""The drafter's candidates: top-K tokens of every position with full-vocabulary log-probabilities.

Runs behind the drafter's forward pass, inside its CUDA graph when there is one, and writes into buffers of
fixed address. With a vocabulary split over ranks every rank contributes its own K best and its own
log-sum-exp: K values a rank cross the wire, not the vocabulary, and all ranks end up with the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from ddtree_engine.sglang_plugin.tree_build import TreeBatch, TreeBuilder
from torch import Tensor

# Equal logits beyond the K-th that are still ranked by token id.
TIES = 4


class Group(Protocol):
    """SGLang's tensor-parallel group, as far as it is used here."""

    world_size: int

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> Any: ...


@dataclass(frozen=True, eq=False)
class Head:
    """This rank's part of the language-model head.

    weight  [rows, hidden], its first `rows_used` rows are real;  start  the first row's token id
    """

    weight: Tensor
    rows_used: int
    start: int
    group: Group | None = None


def ranked(values: Tensor, ids: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The `keep` best of [n, m] candidates, by value, equal values by ascending id. For small m."""
    ahead = (values[:, None, :] > values[:, :, None]) | (
        (values[:, None, :] == values[:, :, None]) & (ids[:, None, :] < ids[:, :, None])
    )
    place = ahead.sum(-1)
    order = torch.zeros_like(ids).scatter_(
        1, place, torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    )
    order = order[:, :keep]
    return values.gather(1, order), ids.gather(1, order)


def candidates(hidden: Tensor, head: Head, topk: int) -> tuple[Tensor, Tensor]:
    """(ids int64[n, K], logprobs float32[n, K]) of n positions, best first, from hidden [n, H]."""
    logits = torch.matmul(hidden.to(head.weight.dtype), head.weight[: head.rows_used].T).float()
    # A few more than wanted: which of equal logits a top-k returns is undefined, and `ranked` decides.
    keep = min(topk + TIES, head.rows_used)
    values, ids = torch.topk(logits, keep, dim=-1)
    normaliser = torch.logsumexp(logits, dim=-1)
    ids = ids + head.start
    if head.group is not None and head.group.world_size > 1:
        values, ids, normaliser = _joined(values, ids, normaliser, head.group)
    values, ids = ranked(values, ids, min(topk, values.shape[1]))
    logprobs = values - normaliser[:, None]
    missing = topk - ids.shape[1]
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing))
        logprobs = torch.nn.functional.pad(logprobs, (0, missing), value=-torch.inf)
    return ids, logprobs


def _joined(values: Tensor, ids: Tensor, normaliser: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    ranks = group.world_size

    def gathered(local: Tensor) -> Tensor:
        out = local.new_empty((ranks * local.shape[0], *local.shape[1:]))
        group.all_gather_into_tensor(out, local.contiguous())
        return out.view(ranks, *local.shape)

    count = values.shape[0]
    values, ids = (gathered(part).transpose(0, 1).reshape(count, -1) for part in (values, ids))
    return values, ids, torch.logsumexp(gathered(normaliser), dim=0)


class TreeDraftSampler:
    """From the drafter's hidden states to candidates and a tree, kept until the next step.

    `out` holds the chain that stock DFLASH reads, int64[max_batch * (F-1)].
    """

    def __init__(self, head: Head, builder: TreeBuilder, block: int, max_batch: int) -> None:
        self.head = head
        self.builder = builder
        self.block = block
        positions, width = block - 1, builder.width
        device = head.weight.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros((max_batch, *shape), dtype=torch.int64, device=device)

        self.out = ints(positions).view(-1)
        self.ids = ints(positions, builder.topk)
        self.logprobs = torch.zeros((max_batch, positions, builder.topk), device=device)
        self.tree = TreeBatch(
            tokens=ints(width),
            parents=ints(width),
            depths=ints(width),
            ranks=ints(width),
            scores=torch.zeros((max_batch, width), device=device),
        )

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """hidden_states [N*F, H] and the block's input_ids int[N*F] (the root's token first)."""
        batch = hidden_states.shape[0] // self.block
        hidden = hidden_states.view(batch, self.block, -1)[:, 1:].reshape(-1, hidden_states.shape[-1])
        ids, logprobs = candidates(hidden, self.head, self.builder.topk)
        ids, logprobs = (x.view(batch, self.block - 1, -1) for x in (ids, logprobs))
        roots = input_ids.view(batch, self.block)[:, 0]
        self.ids[:batch].copy_(ids)
        self.logprobs[:batch].copy_(logprobs)
        self.out[: batch * (self.block - 1)].copy_(ids[..., 0].reshape(-1))
        built = self.builder(roots, ids, logprobs)
        for name in ("tokens", "parents", "depths", "ranks", "scores"):
            getattr(self.tree, name)[:batch].copy_(getattr(built, name))

    def trees(self, batch: int) -> TreeBatch:
        """The last call's trees, views of its buffers."""
        return TreeBatch(
            *(getattr(self.tree, name)[:batch] for name in ("tokens", "parents", "depths", "ranks", "scores"))
        )


class ShadowDraftSampler:
    """Stock DFLASH's own sampler, untouched, and the tree that would have been built beside it."""

    def __init__(self, stock: Any, tree: TreeDraftSampler) -> None:
        self.stock = stock
        self.tree = tree

    @property
    def out(self) -> Tensor:
        out: Tensor = self.stock.out
        return out

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        self.stock(hidden_states, input_ids)
        self.tree(hidden_states, input_ids)
