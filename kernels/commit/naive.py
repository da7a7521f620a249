"""Rebuild a request's recurrent state and convolution window after its accepted path.

Verification keeps no state per node. It stashes what went into the layer (q, k and v before the convolution,
and the gate projections a, b), and the commit replays the accepted nodes one by one: convolution, l2-norm,
gates, update, in the order and precision of a plain decode. So the rounding of a verify pass never reaches
the carried state.
"""

from __future__ import annotations

import torch
from ddtree_kernels.ancestry import chain_parents
from ddtree_kernels.tree_conv.naive import commit_window_naive, tree_conv_naive
from ddtree_kernels.tree_gdn.gates import gates, l2_normalise
from ddtree_kernels.tree_gdn.naive import gdn_step
from torch import Tensor


def commit_naive(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    path: Tensor,
    counts: Tensor,
    *,
    key_heads: int,
    activation: str | None = "silu",
    track_counts: Tensor | None = None,
    track_slots: Tensor | None = None,
) -> None:
    """Advance one layer's pools past the accepted nodes, in place.

    x           [N, Q, C], stashed pre-convolution q, k, v side by side, C = 2 H K + HV V
    a, b        [N, Q, HV], stashed gate projections;  A_log, dt_bias  [HV]
    weight      [C, W];  bias  [C] or None
    conv_pool   [slots, C, W-1];  state_pool  [slots, HV, V, K]
    slots       int[N], negative: the request is padding and nothing is written
    path        int[N, P], accepted rows in order, root first;  counts  int[N], how many, 0..P
    key_heads   H
    track_counts, track_slots  int[N] each: also write the window and state after the first `track_counts`
                accepted rows to row `track_slots` of the pools (a prefix-cache snapshot); negative: none

    The update is float32 (float64 for float64 stash), its result is stored in the pool's dtype.
    """
    _, heads, value_dim, key_dim = state_pool.shape
    key_width = key_heads * key_dim
    for request, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        if slot < 0:
            continue
        rows = path[request, :count].long()
        one = slice(request, request + 1)
        mixed = x[request, rows][None]
        chain = chain_parents(1, count, x.device)
        conv = tree_conv_naive(mixed, conv_pool, slots[one], weight, bias, chain, activation=activation)[0]
        k, v = conv[:, key_width : 2 * key_width], conv[:, 2 * key_width :]
        k = l2_normalise(k.view(count, key_heads, key_dim)).repeat_interleave(heads // key_heads, dim=1)
        g, beta = gates(a[request, rows], b[request, rows], A_log, dt_bias)
        state = state_pool[slot].to(g.dtype)
        v = v.reshape(count, heads, value_dim).to(g.dtype)

        snapshot = -1 if track_counts is None else int(track_counts[request])
        target = -1 if track_slots is None else int(track_slots[request])
        for step in range(count + 1):
            if step == snapshot and target >= 0:
                state_pool[target] = state.to(state_pool.dtype)
                conv_pool[target] = conv_pool[slot]
                track = torch.tensor([target]), torch.tensor([step])
                commit_window_naive(x[one], conv_pool, track[0], path[one], track[1])
            if step < count:
                state, _ = gdn_step(k[step], k[step], v[step], g[step], beta[step], state)
        state_pool[slot] = state.to(state_pool.dtype)
        commit_window_naive(x[one], conv_pool, slots[one], path[one], counts[one])
