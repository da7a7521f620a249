"""Draft trees on the device, for a whole batch, without a host synchronisation.

The same trees, node for node, as `ddtree_engine.tree.build.build_tree`, whose docstring defines order and
ties. Every operation has a fixed shape, so the builder can be captured in a CUDA graph.

All candidate lists lie in one table, each sorted and closed by a column of -inf, so that "the parent's next
offer" is the next entry. Every node holds a cursor, the entry that it offers next; a round takes the best
offer, moves its parent's cursor on and opens the new node's own list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ddtree_engine.tree.build import Builder
from ddtree_engine.tree.calibration import (
    LOG_SIGMOID,
    LOG_SIGMOID_STEP,
    TABLE_LIMIT,
    TABLE_PER_UNIT,
    Calibration,
)
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """One tree of Q nodes a request, node 0 the root, parents before children.

    tokens   int64[N, Q]
    parents  int64[N, Q], -1 for the root
    depths   int64[N, Q]
    ranks    int64[N, Q], column in the candidate table, 0 for the root
    scores   float32[N, Q], log-score of the path; -inf marks a row that fills up an exhausted table (a
             further child of the root with the root's token)
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    scores: Tensor

    def first(self, width: int) -> TreeBatch:
        """The first nodes, views: the trees of a smaller budget, since no builder's order depends on it."""
        kept = (self.tokens, self.parents, self.depths, self.ranks, self.scores)
        return TreeBatch(*(tensor[:, :width] for tensor in kept))


class TreeBuilder:
    """Builds trees of `budget` nodes below the root from `block` - 1 positions x `topk` candidates."""

    def __init__(
        self,
        block: int,
        topk: int,
        budget: int,
        builder: Builder,
        calibration: Calibration | None,
        device: torch.device | str,
    ) -> None:
        self.positions = block - 1
        self.topk = topk
        self.width = budget + 1
        self.builder = builder
        # Spine-first: nodes 0..spine-1 have their rank-0 child from the start.
        self.spine = min(self.positions, budget) if builder is Builder.SPINE_FIRST else 0
        self._edges = None if calibration is None else _CalibratedEdges(calibration, block, topk, device)

    def __call__(self, root_tokens: Tensor, ids: Tensor, logprobs: Tensor) -> TreeBatch:
        """Grow the trees.

        root_tokens  int[N]
        ids          int[N, F-1, K], best first (column 0 is the spine)
        logprobs     float32[N, F-1, K], -inf = no candidate; never -inf in column 0
        """
        table = self._table(ids.long(), logprobs.float().clamp_max(0.0))
        parents, picked, scores = self._grow(table)
        return self._trees(table, root_tokens.long(), parents, picked, scores)

    def _table(self, ids: Tensor, logprobs: Tensor) -> _Table:
        if self._edges is not None:
            sides = [
                self._edges(logprobs, on_spine=False),
                self._edges(logprobs, on_spine=True),
            ]
        elif self.spine:
            taken = logprobs.clone()
            taken[..., 0] = -torch.inf
            sides = [logprobs, taken]
        else:
            sides = [logprobs]
        return _Table.of(ids, sides, forks_by_spine=self._edges is not None)

    def _grow(self, table: _Table) -> tuple[Tensor, Tensor, Tensor]:
        batch, device = table.edges.shape[0], table.edges.device
        parents = torch.full((batch, self.width), -1, dtype=torch.int64, device=device)
        picked = torch.zeros((batch, self.width), dtype=torch.int64, device=device)
        scores = torch.full((batch, self.width), -torch.inf, dtype=torch.float32, device=device)
        cursors = torch.zeros((batch, self.width), dtype=torch.int64, device=device)
        offers = torch.full((batch, self.width), -torch.inf, dtype=torch.float32, device=device)
        scores[:, 0] = 0.0
        root_side = 1 if self._edges is not None else 0
        for node in range(self.spine + 1):
            if node:
                parents[:, node] = node - 1
                picked[:, node] = table.cursor(0, node - 1, 0)
                # Rank 0 is the best candidate of a sorted list, so its entry is the row's first.
                scores[:, node] = scores[:, node - 1] + table.edges[:, table.cursor(0, node - 1, 0)]
            side = 1 if node < self.spine else 0
            cursor = table.cursor(side if self.spine else root_side, node, 0)
            cursors[:, node] = cursor
            offers[:, node] = scores[:, node] + table.edges[:, cursor]
        for node in range(self.spine + 1, self.width):
            # argmax gives the first of equals: the parent with the smaller index.
            parent = offers.argmax(dim=1, keepdim=True)
            taken = cursors.gather(1, parent)
            score = offers.gather(1, parent)
            parents[:, node] = parent[:, 0]
            picked[:, node] = taken[:, 0]
            scores[:, node] = score[:, 0]
            # An exhausted table offers -inf only: its cursors stay, or they would run into the next list.
            following = taken + (score > -torch.inf)
            cursors.scatter_(1, parent, following)
            offers.scatter_(1, parent, scores.gather(1, parent) + table.edges.gather(1, following))
            opened = table.children.gather(1, taken)
            cursors[:, node] = opened[:, 0]
            offers[:, node] = (score + table.edges.gather(1, opened))[:, 0]
        return parents, picked, scores

    def _trees(
        self, table: _Table, root_tokens: Tensor, parents: Tensor, picked: Tensor, scores: Tensor
    ) -> TreeBatch:
        missing = scores == -torch.inf
        tokens = torch.where(missing, root_tokens[:, None], table.ids.gather(1, picked))
        ranks = table.columns.gather(1, picked).masked_fill(missing, 0)
        depths = (table.depths[picked] + 1).masked_fill(missing, 1)
        parents = parents.masked_fill(missing, 0)
        tokens[:, 0], ranks[:, 0], depths[:, 0], parents[:, 0] = root_tokens, 0, 0, -1
        return TreeBatch(tokens, parents, depths, ranks, scores)


class KernelTreeBuilder(TreeBuilder):
    """The same trees from one launch of `ddtree_kernels.tree_build`, where a GPU is there to run it."""

    def __init__(
        self,
        block: int,
        topk: int,
        budget: int,
        builder: Builder,
        calibration: Calibration | None,
        device: torch.device | str,
    ) -> None:
        super().__init__(block, topk, budget, builder, calibration, device)
        self._tables = None if calibration is None else calibration_tables(calibration, block, topk, device)

    def __call__(self, root_tokens: Tensor, ids: Tensor, logprobs: Tensor) -> TreeBatch:
        """As `TreeBuilder`; ids and logprobs have unit stride over the candidates."""
        from ddtree_kernels.tree_build.triton import empty_trees, tree_build_unchecked

        out = empty_trees(len(ids), self.width, ids.device)
        tree_build_unchecked(
            root_tokens.contiguous(),
            ids,
            logprobs,
            torch.zeros(len(ids), dtype=torch.int64, device=ids.device),
            self.builder.value,
            self._tables,
            None,
            out,
        )
        return TreeBatch(out.tokens, out.parents, out.depths, out.ranks, out.scores)


def calibration_tables(calibration: Calibration, block: int, topk: int, device: torch.device | str) -> Any:
    """The kernel's `CalibrationTables` for blocks of `block` and `topk` candidates."""
    from ddtree_kernels.tree_build.triton import CalibrationTables

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device).contiguous()

    sides = (calibration.on, calibration.off)
    return CalibrationTables(
        depth=tensor(np.stack([side.depth[: block - 1] for side in sides])),
        rank=tensor(np.stack([side.rank[:topk] for side in sides])),
        slope=tensor([side.slope for side in sides]),
        floor=tensor([calibration.logprob_floor]),
        value=tensor(LOG_SIGMOID),
        step=tensor(LOG_SIGMOID_STEP),
    )


@dataclass(frozen=True, eq=False)
class _Table:
    """Sorted candidate lists, flattened: entry (side, depth of the parent, place in the list).

    edges, ids, columns, children  [N, sides * F * (K+1)]: edge score, token, column, and the cursor with
    which a node that takes this entry starts its own list;  depths  [the same], depth of the parent
    """

    edges: Tensor
    ids: Tensor
    columns: Tensor
    children: Tensor
    depths: Tensor
    rows: int
    places: int

    @classmethod
    def of(cls, ids: Tensor, sides: list[Tensor], *, forks_by_spine: bool) -> _Table:
        batch, positions, topk = ids.shape
        rows, places = positions + 1, topk + 1
        edges = torch.stack(sides, dim=1)
        edges, order = torch.sort(edges, dim=-1, descending=True, stable=True)
        tokens = ids[:, None].expand(-1, len(sides), -1, -1).gather(-1, order)
        pad = (0, 1, 0, 1)  # one place and one row of no candidates
        edges = torch.nn.functional.pad(edges, pad, value=-torch.inf).flatten(1)
        columns = torch.nn.functional.pad(order, pad)
        depths = torch.arange(rows, device=ids.device)[None, :, None].expand(len(sides), rows, places)
        below = (depths + 1).clamp_max(positions) * places
        children = below.expand(batch, -1, -1, -1)
        if forks_by_spine:
            on_spine = torch.zeros_like(columns, dtype=torch.bool)
            on_spine[:, 1] = columns[:, 1] == 0
            children = children + on_spine * (rows * places)
        return cls(
            edges=edges,
            ids=torch.nn.functional.pad(tokens, pad).flatten(1),
            columns=columns.flatten(1),
            children=children.flatten(1),
            depths=depths.reshape(-1),
            rows=rows,
            places=places,
        )

    def cursor(self, side: int, depth: int, place: int) -> int:
        return (side * self.rows + depth) * self.places + place


class _CalibratedEdges:
    """`Calibration.edge_scores` on the device, in the same float32 arithmetic."""

    def __init__(self, calibration: Calibration, block: int, topk: int, device: torch.device | str) -> None:
        self.floor = calibration.logprob_floor
        self.bias, self.slope = {}, {}
        for on_spine, side in ((True, calibration.on), (False, calibration.off)):
            bias = side.depth[: block - 1, None] + side.rank[None, :topk]
            self.bias[on_spine] = torch.from_numpy(bias).to(device)
            self.slope[on_spine] = torch.tensor(side.slope, dtype=torch.float32, device=device)
        self.value = torch.from_numpy(LOG_SIGMOID).to(device)
        self.step = torch.from_numpy(LOG_SIGMOID_STEP).to(device)

    def __call__(self, logprobs: Tensor, *, on_spine: bool) -> Tensor:
        x = self.bias[on_spine] + self.slope[on_spine] * logprobs.clamp_min(self.floor)
        place = (x.clamp(-TABLE_LIMIT, TABLE_LIMIT) + TABLE_LIMIT) * TABLE_PER_UNIT
        entry = place.to(torch.int32).clamp_max(len(self.step) - 1).long()
        score = self.value[entry] + (place - entry.float()) * self.step[entry]
        return score.clamp_max(0.0).masked_fill(logprobs == -torch.inf, -torch.inf)


def encode(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(parent_list int64[N, Q+1], selected_index int64[N, Q-1]) for SGLang's tree builder with topk = Q.

    See `ddtree_engine.tree.layout.sglang_encoding` for why any tree passes.
    """
    batch, width = parents.shape
    # Allocated as they have to lie: the kernel checks strides, also those of a batch of one.
    selected = parents.new_empty((batch, width - 1))
    torch.add(parents[:, 1:] * width, torch.arange(1, width, device=parents.device), out=selected)
    parent_list = parents.new_full((batch, width + 1), -1)
    parent_list[:, 1:-1] = selected
    return parent_list, selected
