"""The commit of a verify pass: every state moves along its accepted path, replayed from the stash."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ddtree_engine.sglang_plugin.wy.stash import Stash
from ddtree_engine.sglang_plugin.wy.verify import ACTIVATIONS, Weights
from ddtree_kernels.commit.triton import commit
from torch import Tensor


@dataclass(frozen=True)
class Stacked:
    """All layers' parameters: weight [L, C, W], bias [L, C] or None, A_log and dt_bias [L, HV]."""

    weight: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str | None


@dataclass(frozen=True)
class Track:
    """Which prefix-cache snapshots a commit takes: int[N] each, negative for none.

    counts  after how many accepted nodes
    slots   into which slot of the pools
    """

    counts: Tensor
    slots: Tensor


def stack(layers: list[Weights]) -> Stacked:
    """Copy the layers' parameters side by side. Raises `ValueError` where they are not of one kind."""
    first = layers[0]
    if len({(one.activation, one.bias is None) for one in layers}) > 1:
        raise ValueError(
            "recurrent layers: found different activations or biases, allowed is one kind in all"
        )
    biases = [one.bias for one in layers if one.bias is not None]
    with torch.no_grad():
        return Stacked(
            weight=torch.stack([one.weight for one in layers]),
            bias=torch.stack(biases) if biases else None,
            A_log=torch.stack([one.A_log for one in layers]),
            dt_bias=torch.stack([one.dt_bias for one in layers]),
            activation=first.activation,
        )


def commit_paths(
    stash: Stash,
    stacked: Stacked,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    accept_index: Tensor,
    accept_lens: Tensor,
    track: Track | None,
) -> None:
    """Advance all layers' pools past the accepted nodes, in place; two launches, no host synchronisation.

    Once a pass: as many first rows of the stash as were accepted are overwritten.

    conv_pool     [L, slots, C, W-1];  state_pool  [L, slots, HV, V, K]
    slots         int[N], negative: nothing is written
    accept_index  int[N, P], accepted rows of the pass counted through the batch (request r's node i is
                  r * Q + i), root first, anything after the accepted ones
    accept_lens   int[N], how many of them, the root included
    """
    requests, width = len(slots), stash.layout.width
    # Widths of the index types are part of what Triton compiles for: one kind whatever came in.
    first = torch.arange(0, requests * width, width, dtype=torch.int32, device=accept_index.device)
    path = accept_index.to(torch.int32) - first[:, None]
    commit(
        stash.x[:, :requests],
        stash.a[:, :requests],
        stash.b[:, :requests],
        stacked.A_log,
        stacked.dt_bias,
        stacked.weight,
        stacked.bias,
        conv_pool,
        state_pool,
        slots.to(torch.int32),
        path,
        accept_lens.to(torch.int32),
        key_heads=stash.layout.key_heads,
        activation=ACTIVATIONS[stacked.activation],
        track_counts=None if track is None else track.counts.to(torch.int32),
        track_slots=None if track is None else track.slots.to(torch.int64),
    )


def track_at(seq_lens: Tensor, accept_lens: Tensor, grid: int, slots: Tensor) -> Track:
    """Snapshots where a request's length passes a multiple of `grid`: the state at the last one passed.

    seq_lens  int[N] before the pass;  slots  int[N], where SGLang wants a request's snapshot
    """
    reached = (seq_lens + accept_lens) // grid * grid
    return Track(torch.where(reached > seq_lens, reached - seq_lens, -1), slots)
