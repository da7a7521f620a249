"""Gated delta rule over a tree, the readable form: every node forks its parent's state.

For a node with parent state S [V, K] (row v holds the value memory of channel v):

    S  <-  exp(g) S
    u   =  beta (v - S k)
    S  <-  S + u k^T
    o   =  S q

The root forks the request's own state. Float64 input gives a float64 oracle.
"""

from __future__ import annotations

import torch
from ddtree_kernels.tree_gdn.gates import recurrence
from torch import Tensor


def tree_gdn_naive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and states of every node.

    q, k     [N, Q, H, K], ready to use (normalised, q scaled);  v  [N, Q, HV, V], HV a multiple of H
    g, beta  [N, Q, HV], log decay (<= 0) and write strength
    state    [N, HV, V, K], before the root;  parents  int[N, Q], see `ddtree_kernels.ancestry`

    Returns o [N, Q, HV, V] and the states after every node [N, Q, HV, V, K], in state's dtype.
    """
    batch, width, heads = v.shape[:3]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    requests = torch.arange(batch, device=v.device)
    out = torch.empty(v.shape, dtype=state.dtype, device=v.device)
    states = torch.empty(batch, width, *state.shape[1:], dtype=state.dtype, device=v.device)
    for node in range(width):
        parent = parents[:, node] if node else parents.new_full((batch,), -1)
        forked = states[requests, parent.clamp_min(0)]
        before = torch.where((parent < 0)[:, None, None, None], state, forked)
        states[:, node], out[:, node] = gdn_step(
            q[:, node], k[:, node], v[:, node], g[:, node], beta[:, node], before
        )
    return out, states


def gdn_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One decode step: q, k [..., HV, K], v [..., HV, V], g, beta [..., HV] -> (new state, output)."""
    state = state * g.exp()[..., None, None]
    u = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + u[..., None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


def tree_gdn_verify_naive(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    parents: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Outputs [N, Q, HV, V] (v's dtype) of a tree from a layer's raw inputs; the pool is only read.

    Shapes as in `ddtree_kernels.tree_gdn.gates.recurrence`.
    """
    out, _ = tree_gdn_naive(*recurrence(a, b, A_log, dt_bias, q, k, v, state_pool, slots, scale), parents)
    return out.to(v.dtype)
