"""Penalties of output tokens, exact at every node of a tree.

A node's logits are adjusted for the request's output up to and including the node: what was committed before,
the root, and the node's own path. Per token, with n its count in that output:

    frequency   logit - f * n
    presence    logit - p                                  if n > 0
    repetition  logit * r if that is negative, else / r    if n > 0, after the other two
    least       -inf for stop tokens, while the output is shorter than `min_new_tokens`

These are SGLang's penalties in plain decoding. Its speculative step counts one token of the several that it
accepts, under overlap those of the step before last, and gives all nodes the same; nothing of that is used.

Committed tokens are counted on the device, one row of the vocabulary a request slot, so a step needs neither
the host's view of the output (which lags under overlap) nor a synchronisation. A prefill writes a slot's row
anew, and forward passes are in stream order: who had the slot before, or the same request before it was
retracted, leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """What one request asks for; `least` is its `min_new_tokens`."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    least: int = 0

    @property
    def named(self) -> dict[str, float]:
        """The parameters that do something, by SGLang's names."""
        values = {
            "frequency_penalty": (self.frequency, 0.0),
            "presence_penalty": (self.presence, 0.0),
            "repetition_penalty": (self.repetition, 1.0),
            "min_new_tokens": (self.least, 0),
        }
        return {name: value for name, (value, nothing) in values.items() if value != nothing}


NOTHING = Asked()


def asked(request: Any) -> Asked:
    """Of an SGLang `Req`."""
    parameters = request.sampling_params
    return Asked(
        frequency=parameters.frequency_penalty,
        presence=parameters.presence_penalty,
        repetition=parameters.repetition_penalty,
        least=parameters.min_new_tokens,
    )


def stop_tokens(request: Any) -> set[int]:
    """Tokens that `min_new_tokens` holds back: the same that SGLang's penalty does."""
    tokenizer = request.tokenizer
    found = {
        *(request.sampling_params.stop_token_ids or ()),
        *(request.eos_token_ids or ()),
        *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
        getattr(tokenizer, "eos_token_id", None),
    }
    return {int(token) for token in found if token is not None}


class Penalties:
    """Counts of committed output tokens, one row a request slot."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device | str) -> None:
        self.slots, self.vocabulary, self.device = slots, vocabulary, torch.device(device)
        # Allocated by the first request that wants it: 4 bytes x slots x vocabulary.
        self._counts: Tensor | None = None

    def prefill(self, batch: Any) -> None:
        """Begin the requests of a prefill batch.

        Those that come back after a retraction bring their output with them. SGLang's penalties have
        forgotten it, so the rows that penalise the token which this prefill samples are written here.
        """
        for row, request in enumerate(batch.reqs):
            wanted = asked(request)
            if wanted == NOTHING:
                continue
            counts = self._table()[request.kv.req_pool_idx]
            counts.zero_()
            if not request.output_ids:
                continue
            tokens = _to_device(list(request.output_ids), torch.int64, self.device)
            counts.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
            self._come_back(batch.sampling_info, row, request, wanted, counts)

    def _come_back(self, info: Any, row: int, request: Any, wanted: Asked, counts: Tensor) -> None:
        seen = counts > 0
        info.acc_additive_penalties[row] = -(wanted.frequency * counts + wanted.presence * seen)
        if len(request.output_ids) < wanted.least:
            stops = _to_device(self._stops(request), torch.int64, self.device)
            info.acc_additive_penalties[row].index_fill_(0, stops, -torch.inf)
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[row] = torch.where(seen, wanted.repetition, 1.0)

    def step(self, batch: Any, tree: TreeBatch, depth: int) -> StepPenalties | None:
        """What a decode step needs, before its forward pass; None when no request asks for any.

        depth  most nodes on a path, the root included
        """
        wants = [asked(request) for request in batch.reqs]
        if all(wanted == NOTHING for wanted in wants):
            return None
        factors = [(wanted.frequency, wanted.presence, wanted.repetition) for wanted in wants]
        return StepPenalties(
            table=self._table(),
            slots=batch.req_pool_indices.long(),
            tree=tree,
            depth=depth,
            factors=_to_device(factors, torch.float32, self.device),
            scaled=[row for row, wanted in enumerate(wants) if wanted.repetition != 1.0],
            held_back=self._held_back(batch, wants),
        )

    def _held_back(self, batch: Any, wants: Sequence[Asked]) -> HeldBack | None:
        # The host may be behind, never ahead: who has reached the minimum there has reached it.
        stops = [
            self._stops(one) if len(one.output_ids) < wanted.least else []
            for one, wanted in zip(batch.reqs, wants, strict=True)
        ]
        if not any(stops):
            return None
        least = [wanted.least if own else 0 for wanted, own in zip(wants, stops, strict=True)]
        columns = max(map(len, stops))
        # Filled up with the first of its own: equal writes to one place.
        padded = [own + (own[:1] or [0]) * (columns - len(own)) for own in stops]
        prompts = [len(one.origin_input_ids) for one in batch.reqs]
        lengths = _to_device([prompts, least], torch.int64, self.device)
        return HeldBack(
            stops=_to_device(padded, torch.int64, self.device),
            # What is committed has a place in the KV cache, the root does not yet.
            output=batch.seq_lens.long() - lengths[0] + 1,
            least=lengths[1],
        )

    def _stops(self, request: Any) -> list[int]:
        return sorted(token for token in stop_tokens(request) if 0 <= token < self.vocabulary)

    def _table(self) -> Tensor:
        if self._counts is None:
            shape = (self.slots, self.vocabulary)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._counts


@dataclass(frozen=True, eq=False)
class HeldBack:
    """Stop tokens of requests that have not reached their minimum.

    stops   int64[N, S];  output  int64[N], tokens of the output, the root included;  least  int64[N]
    """

    stops: Tensor
    output: Tensor
    least: Tensor

    def apply(self, rows: Tensor, depths: Tensor) -> None:
        """Of rows float[N, Q, V], in place; depths int64[N, Q]."""
        too_short = self.output[:, None] + depths < self.least[:, None]
        places = self.stops[:, None].expand(-1, rows.shape[1], -1)
        kept = rows.gather(2, places)
        rows.scatter_(2, places, kept.masked_fill(too_short[..., None], -torch.inf))


@dataclass(frozen=True, eq=False)
class StepPenalties:
    """The penalties of one step.

    table    int32[slots, V], output tokens committed before the step, its root not among them
    slots    int64[N];  tree  the step's trees
    factors  float32[N, 3]: frequency, presence, repetition; (0, 0, 1) leaves a request's logits as they are
    scaled   rows with a repetition penalty
    """

    table: Tensor
    slots: Tensor
    tree: TreeBatch
    depth: int
    factors: Tensor
    scaled: Sequence[int]
    held_back: HeldBack | None

    def apply(self, logits: Tensor) -> None:
        """Adjust float[N * Q, V] in place, every row for its own node."""
        requests, width = self.tree.tokens.shape
        rows = logits.view(requests, width, -1)
        counts = self.table[self.slots]
        # Tokens of the path first, while their logits are as the target gave them.
        tokens, on_path = path_tokens(self.tree, self.depth)
        places = tokens.view(requests, -1)
        seen = counts.gather(1, places).view_as(tokens) + on_path
        frequency, presence, repetition = self.factors.view(requests, 3, 1, 1).unbind(1)
        values = rows.gather(2, tokens).float() - (frequency * seen + presence * (seen > 0))
        values = torch.where(seen > 0, _scaled(values, repetition), values)
        self._apply_committed(rows, counts)
        rows.scatter_(2, tokens, values.to(rows.dtype))
        if self.held_back is not None:
            self.held_back.apply(rows, self.tree.depths)

    def _apply_committed(self, rows: Tensor, counts: Tensor) -> None:
        seen = counts > 0
        rows.sub_((self.factors[:, :1] * counts + self.factors[:, 1:2] * seen)[:, None])
        # One request at a time: the temporaries are as large as its logits.
        for row in self.scaled:
            scale = torch.where(seen[row], self.factors[row, 2], 1.0)
            rows[row] = _scaled(rows[row], scale)

    def commit(self, accept_index: Tensor) -> None:
        """Count a step's accepted path, its root included; the bonus token is the next step's root.

        accept_index  int[N, D], rows of the flattened trees, -1 behind the path
        """
        tokens = self.tree.tokens.reshape(-1)[accept_index.long().clamp_min(0)]
        places = self.slots[:, None] * self.table.shape[1] + tokens
        taken = (accept_index >= 0).to(self.table.dtype)
        self.table.view(-1).scatter_add_(0, places.view(-1), taken.view(-1))


def path_tokens(tree: TreeBatch, depth: int) -> tuple[Tensor, Tensor]:
    """(tokens int64[N, Q, D], counts int64[N, Q, D]) of every node's path, the node itself first.

    counts[..., j] says how often tokens[..., j] is on the path. Behind the root the root is repeated, which
    counts once.
    """
    at = torch.arange(tree.tokens.shape[1], device=tree.tokens.device).expand_as(tree.tokens)
    found, real = [tree.tokens], [torch.ones_like(at, dtype=torch.bool)]
    for _ in range(depth - 1):
        real.append(at > 0)
        at = tree.parents.gather(1, at).clamp_min(0)
        found.append(tree.tokens.gather(1, at))
    tokens, valid = torch.stack(found, 2), torch.stack(real, 2)
    same = tokens[..., :, None] == tokens[..., None, :]
    return tokens, (same & valid[..., None, :]).sum(-1)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(values < 0, values * scale, values / scale)


def _to_device(values: Iterable[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    # From pinned memory a copy waits for nothing.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
