"""From a gated delta net's raw projections to what its recurrence takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# As in SGLang's and transformers' gated delta nets.
L2_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


class Recurrence(NamedTuple):
    """Inputs of the recurrence: q, k [N, Q, H, K] normalised, q scaled; v [N, Q, HV, V]; g, beta [N, Q, HV];
    state [N, HV, V, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay `g = -exp(A_log) softplus(a + dt_bias)` (<= 0) and write strength `beta = sigmoid(b)`.

    a, b  [..., HV];  A_log, dt_bias  [HV]. Both results are float32, float64 for float64 input.
    """
    compute = torch.promote_types(a.dtype, torch.float32)
    x = a.to(compute) + dt_bias.to(compute)
    g = -A_log.to(compute).exp() * torch.nn.functional.softplus(x, threshold=SOFTPLUS_THRESHOLD)
    return g, b.to(compute).sigmoid()


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recurrence(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
) -> Recurrence:
    """Everything a verify pass gets, as SGLang's tree verify gets it, prepared for the plain forms.

    a, b        [N, Q, HV];  A_log, dt_bias  [HV]
    q, k        [N, Q, H, K], v  [N, Q, HV, V], after the convolution, not normalised; HV a multiple of H
    state_pool  [slots, HV, V, K];  slots  int[N], negative: no prefix (zero state)
    scale       of q, default K ** -0.5
    """
    g, beta = gates(a, b, A_log, dt_bias)
    state = state_pool[slots.clamp_min(0).long()]
    state = torch.where((slots >= 0)[:, None, None, None], state, torch.zeros_like(state))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    compute = torch.promote_types(q.dtype, torch.float32)
    return Recurrence(l2_normalise(q) * scale, l2_normalise(k), v.to(compute), g, beta, state.to(compute))
