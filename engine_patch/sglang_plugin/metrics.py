"""What the steps did, counted on the device and read without stopping it.

`StepCounters` adds up on the device in every step; a copy to the host is started now and then and read once
it has arrived. `HostTap` is the same for whole tensors (step log, shadow scoring): copies are queued with an
event and handed out when the event has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from torch import Tensor

# Untyped in torch.
Event: Any = torch.cuda.Event

SCALARS = ("requests", "accepted", "chain_accepted", "below_spine", "tree_kernel_requests")


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """One verified step of N requests.

    tree          what was verified
    spine         int64[N, F-1], the drafter's best token of every position
    path          int64[N, D], accepted nodes in order, root first; entries from `accepted` on are not read
    accepted      int64[N], length of the path (matched drafts + the bonus token)
    bonus         int64[N], the target's token after the path
    parents_seen  int[N, Q] as the recurrent layers' kernel rebuilt them, None on models without such layers
    """

    tree: TreeBatch
    spine: Tensor
    path: Tensor
    accepted: Tensor
    bonus: Tensor
    parents_seen: Tensor | None

    def chain(self) -> tuple[Tensor, Tensor]:
        """(matched int64[N], below bool[N]): what the top-1 chain alone would have matched.

        Exact where the chain leaves the accepted path; where the whole path is the chain's start and the tree
        ended before it, only the next token is known, so `matched` is a lower bound there and `below` is
        true: the tree accepted less than its own chain would have.
        """
        along = self.tree.ranks.gather(1, self.path.clamp_min(0)) == 0
        steps = torch.arange(self.path.shape[1], device=self.path.device)
        on_chain = along & (steps < self.accepted[:, None])
        inside = on_chain[:, 1:].long().cumprod(1).sum(1)
        matched = self.accepted - 1
        positions = self.spine.shape[1]
        following = self.spine.gather(1, matched.clamp_max(positions - 1)[:, None])[:, 0]
        below = (inside == matched) & (matched < positions) & (following == self.bonus)
        return inside + below, below


class StepCounters:
    """Totals since the start, on the device: `SCALARS` and two histograms of matched drafts."""

    def __init__(self, depth: int, device: torch.device | str) -> None:
        self.depth = depth
        self._totals = torch.zeros(len(SCALARS) + 2 * depth, dtype=torch.int64, device=device)
        self.steps = 0
        self._pending: tuple[Tensor, Any, int] | None = None
        self._latest: tuple[Tensor, int] = (self._totals.cpu(), 0)

    def add(self, outcome: StepOutcome) -> Tensor:
        """Count a step; returns int32[N], the chain's matched drafts."""
        chain, below = outcome.chain()
        seen = outcome.parents_seen
        if seen is None:
            kernel = torch.zeros_like(below)
        else:
            kernel = (seen[:, 1:] == outcome.tree.parents[:, 1:]).all(dim=1)
        matched = outcome.accepted - 1
        self._totals[0] += matched.numel()
        self._totals[1 : len(SCALARS)] += torch.stack([matched.sum(), chain.sum(), below.sum(), kernel.sum()])
        self._totals[len(SCALARS) : len(SCALARS) + self.depth] += _histogram(matched, self.depth)
        self._totals[len(SCALARS) + self.depth :] += _histogram(chain, self.depth)
        self.steps += 1
        return chain.int()

    def start_copy(self) -> None:
        """Start copying the totals to the host, unless a copy is on its way."""
        if self._pending is not None:
            return
        event = None
        if self._totals.is_cuda:
            host = torch.empty_like(self._totals, device="cpu", pin_memory=True)
            host.copy_(self._totals, non_blocking=True)
            event = Event()
            event.record()
        else:
            host = self._totals.clone()
        self._pending = (host, event, self.steps)

    def read(self) -> dict[str, Any]:
        """The last totals that have arrived; never waits."""
        if self._pending is not None and (self._pending[1] is None or self._pending[1].query()):
            self._latest = (self._pending[0], self._pending[2])
            self._pending = None
        totals, steps = self._latest
        values = totals.tolist()
        matched = values[len(SCALARS) : len(SCALARS) + self.depth]
        chain = values[len(SCALARS) + self.depth :]
        read: dict[str, Any] = {"steps": steps, **dict(zip(SCALARS, values, strict=False))}
        read["matched_histogram"], read["chain_matched_histogram"] = matched, chain
        if read["requests"]:
            read["accept_length"] = 1 + read["accepted"] / read["requests"]
            read["spine_accept_length"] = 1 + read["chain_accepted"] / read["requests"]
        return read


def _histogram(values: Tensor, bins: int) -> Tensor:
    # Not torch.bincount, which waits for the device.
    return (values[:, None] == torch.arange(bins, device=values.device)).sum(0)


@dataclass
class HostTap:
    """Tensors on their way to the host, in order."""

    _queue: deque[tuple[dict[str, Any], dict[str, Tensor], Any]] = field(default_factory=deque)

    def put(self, label: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Queue copies of the tensors as they are now on the current stream."""
        event = None
        host: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                event = event or Event()
            else:
                host[name] = tensor.clone()
        if event is not None:
            event.record()
        self._queue.append((label, host, event))

    def take(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The oldest, waited for; None when nothing is on its way."""
        if not self._queue:
            return None
        label, tensors, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        return label, tensors

    def arrived(self) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """What has arrived, oldest first; never waits."""
        while self._queue and (self._queue[0][2] is None or self._queue[0][2].query()):
            label, tensors, _ = self._queue.popleft()
            yield label, tensors


class StageTimes:
    """Device time between marks of a step, in the last of every `every` steps: first ones compile."""

    def __init__(self, enabled: bool, every: int = 16) -> None:
        self.enabled = enabled
        self.every = every
        self.seconds: dict[str, float] = {}
        self.sampled = 0
        self._step = 0
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[list[tuple[str, Any]]] = deque()

    def mark(self, name: str) -> None:
        """The stage that ends here; the first mark of a step is its start."""
        if not self.enabled or self._step % self.every != self.every - 1:
            return
        event = Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def end_step(self) -> None:
        """Close the step and add up sampled steps that the device has finished."""
        self._step += 1
        if self._marks:
            self._pending.append(self._marks)
            self._marks = []
        while self._pending and self._pending[0][-1][1].query():
            marks = self._pending.popleft()
            self.sampled += 1
            for (_, start), (name, end) in pairwise(marks):
                self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3

    def read(self) -> dict[str, Any]:
        """Mean seconds a sampled step spent in each stage."""
        means = {name: total / self.sampled for name, total in self.seconds.items()} if self.sampled else {}
        return {"sampled_steps": self.sampled, "stage_seconds": means}
