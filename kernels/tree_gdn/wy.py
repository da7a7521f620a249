"""Gated delta rule over a tree as one triangular solve (ancestor-mask WY form).

With anc(i) the ancestors of node i and i itself, D[i, j] the decay from j to i (0 unless j is in anc(i)) and
G_i the log decay from the prefix to i:

    A[i, j] = beta_i (k_i . k_j) D[i, j]                       for j in anc(i), j != i
    (I + A) U = beta_i (v_i - exp(G_i) S0 k_i)                 unit lower triangular: parents come first
    o_i = exp(G_i) S0 q_i + sum over j in anc(i) of D[i, j] (q_i . k_j) u_j

No state is stored per node. (The WY transform of the delta rule, arXiv 2406.06484, with gates as in arXiv
2412.06464; the tree's ancestor mask takes the place of the causal one as in arXiv 2608.20961.)

Two things keep it accurate. The solve is forward substitution, never an explicit inverse by squaring, which
blows up on correlated keys. And log D[i, j] is summed over the path between the two nodes, all terms of one
sign, instead of the difference G_i - G_j of two possibly huge numbers; outside the mask it is -inf, so exp
never sees a positive number.
"""

from __future__ import annotations

import torch
from ddtree_kernels.ancestry import ancestor_mask
from ddtree_kernels.tree_gdn.gates import recurrence
from torch import Tensor


def tree_gdn_wy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: Tensor,
    *,
    mask: Tensor | None = None,
    leaf: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of every node, and the state after one node per request when `leaf` asks for it.

    Shapes as in `ddtree_kernels.tree_gdn.naive.tree_gdn_naive`; besides:
    mask  `ancestor_mask(parents)` when the caller has it already (it is the same for all layers)
    leaf  int[N], the node whose state to return (with chain parents and leaf Q-1: a prefill chunk)

    Returns o [N, Q, HV, V] and the state [N, HV, V, K] or None, both in state's dtype.
    """
    heads = v.shape[2]
    mask = ancestor_mask(parents) if mask is None else mask
    seen = mask[:, None]  # [N, 1, Q, Q]
    grouped = k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [N, heads, Q, .]
    kk, qk = ((x @ k.transpose(-1, -2)).repeat_interleave(heads // grouped, dim=1) for x in (k, q))
    q, k = (x.repeat_interleave(heads // grouped, dim=1) for x in (q, k))
    g, beta = g.transpose(1, 2), beta.transpose(1, 2)[..., None]

    on_path = seen.to(g.dtype)
    from_prefix = (on_path * g[:, :, None, :]).sum(-1, keepdim=True).exp()
    between = (on_path * g[:, :, None, :]) @ (1 - on_path).transpose(-1, -2)
    decay = between.masked_fill(~seen, -torch.inf).exp()

    A = beta * kk * decay  # the solve reads below the diagonal only
    S0 = state.transpose(-1, -2)
    rhs = beta * (v - from_prefix * (k @ S0))
    U = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    out = from_prefix * (q @ S0) + (qk * decay) @ U
    return out.transpose(1, 2), None if leaf is None else _state_at(leaf, k, U, from_prefix, decay, state)


def _state_at(
    leaf: Tensor, k: Tensor, U: Tensor, from_prefix: Tensor, decay: Tensor, state: Tensor
) -> Tensor:
    requests = torch.arange(len(leaf), device=leaf.device)
    weight = decay[requests, :, leaf.long()]  # [N, HV, Q], zero off the path
    written = (U * weight[..., None]).transpose(-1, -2) @ k
    return from_prefix[requests, :, leaf.long()][..., None] * state + written


def tree_gdn_verify_wy(
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
    mask: Tensor | None = None,
) -> Tensor:
    """Outputs [N, Q, HV, V] (v's dtype) of a tree from a layer's raw inputs; the pool is only read.

    Shapes as in `ddtree_kernels.tree_gdn.gates.recurrence`.
    """
    inputs = recurrence(a, b, A_log, dt_bias, q, k, v, state_pool, slots, scale)
    out, _ = tree_gdn_wy(*inputs, parents, mask=mask)
    return out.to(v.dtype)
