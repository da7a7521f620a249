"""The gated delta rule: one recurrent step, and the chunked form for training (plain torch, differentiable).

Recurrence per head, with state S [key dim, value dim] (Yang et al., arXiv 2412.06464):
S_t = exp(g_t) S_{t-1};  d_t = beta_t (v_t - S_t^T k_t);  S_t += k_t d_t^T;  o_t = S_t^T q_t / sqrt(key dim).
Within a chunk, the d_t solve a unit lower triangular system (the WY form); chunks are linked by the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
BASE = 16  # diagonal blocks inverted by a Neumann product; larger ones would lose digits in fp32


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, Hv, Dv] and the last state [B, Hv, Dk, Dv] (fp32).

    q, k [B, T, Hk, Dk] of unit length, v [B, T, Hv, Dv]; g (log decay, <= 0), beta [B, T, Hv] in fp32.
    Value head j reads key head j // (Hv / Hk). Products run in the autocast dtype, decays and
    inverse in fp32.
    """
    b, t, hk, dk = k.shape
    hv, dv = v.shape[-2:]
    r, pad = hv // hk, -t % chunk
    n = (t + pad) // chunk
    q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q * dk**-0.5, k, v))
    g, beta = (functional.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    q, k = (
        x.reshape(b, n, chunk, hk, 1, dk).permute(1, 0, 3, 4, 2, 5) for x in (q, k)
    )  # [n, b, hk, 1, c, d]
    v = v.reshape(b, n, chunk, hk, r, dv).permute(1, 0, 3, 4, 2, 5)
    g, beta = (x.reshape(b, n, chunk, hk, r).permute(1, 0, 3, 4, 2) for x in (g, beta))  # [n, b, hk, r, c]
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (torch.matmul(k, k.transpose(-1, -2)).float() * beta[..., None] * decay).tril(-1)
    inverse = UnitLowerInverse.apply(system).to(v.dtype)
    fresh = torch.matmul(inverse, v * beta[..., None].to(v.dtype))
    read = torch.matmul(inverse, k * (beta * total.exp())[..., None].to(k.dtype))
    within = (torch.matmul(q, k.transpose(-1, -2)).float() * decay).to(v.dtype)
    query = q * total.exp()[..., None].to(q.dtype)
    last = total[..., -1:]
    write = (k * (last - total).exp()[..., None].to(k.dtype)).transpose(-1, -2)
    keep = last[..., None].exp()
    s = (
        q.new_zeros(b, hk, r, dk, dv, dtype=torch.float32)
        if state is None
        else state.reshape(b, hk, r, dk, dv)
    )
    outs = []
    for i in range(n):
        s16 = s.to(v.dtype)
        delta = fresh[i] - torch.matmul(read[i], s16)
        outs.append(torch.matmul(query[i], s16) + torch.matmul(within[i], delta))
        s = keep[i] * s + torch.matmul(write[i], delta).float()
    out = torch.stack(outs).permute(1, 0, 4, 2, 3, 5).reshape(b, n * chunk, hv, dv)[:, :t]
    return out, s.reshape(b, hv, dk, dv)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [..., C, C], C a power of two times BASE."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            inverse = unit_lower_inverse(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            turned = inverse.transpose(-1, -2)
            return -torch.matmul(torch.matmul(turned, grad.float()), turned).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert diagonal blocks of BASE rows, then join neighbours twice as large each time."""
    size = a.shape[-1]
    block = min(BASE, size)
    eye = torch.eye(block, device=a.device, dtype=a.dtype)
    tiles = torch.stack([a[..., i : i + block, i : i + block] for i in range(0, size, block)], -3)
    # (I + A)^-1 = (I - A)(I + A^2)(I + A^4)(I + A^8): A^16 = 0.
    inverse, power, width = eye - tiles, tiles, 1
    while 2 * width < block:
        power, width = torch.matmul(power, power), 2 * width
        inverse = inverse + torch.matmul(inverse, power)
    while block < size:
        upper, low = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = torch.stack(
            [a[..., i + block : i + 2 * block, i : i + block] for i in range(0, size, 2 * block)], -3
        )
        joint = -torch.matmul(torch.matmul(low, corner), upper)
        top = functional.pad(upper, (0, block))
        inverse = torch.cat([top, torch.cat([joint, low], -1)], -2)
        block *= 2
    return inverse.squeeze(-3)


def step_(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token: updates `state` [B, Hv, Dk, Dv] (fp32) in place, returns [B, Hv, Dv] in v's dtype.

    q, k [B, Hk, Dk] of unit length, v [B, Hv, Dv], g and beta [B, Hv].
    """
    r = v.shape[1] // k.shape[1]
    q, k = ((x.float()).repeat_interleave(r, 1) for x in (q * k.shape[-1] ** -0.5, k))
    # One pass reads the state for both vectors, so that a large batch moves it three times and not five.
    reads = torch.matmul(torch.stack([k, q], 2), state) * g.exp()[..., None, None]
    delta = beta[..., None] * (v.float() - reads[:, :, 0])
    decay_and_add_(state, g.exp(), k, delta)
    return (reads[:, :, 1] + (q * k).sum(-1, keepdim=True) * delta).to(v.dtype)


def decay_and_add_(state: Tensor, decay: Tensor, k: Tensor, delta: Tensor) -> None:
    state.mul_(decay[..., None, None]).add_(k[..., :, None] * delta[..., None, :])


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The plain recurrence over [B, T, ...]: what `chunked` must equal. Same shapes."""
    b, t, hv, dv = v.shape
    state = torch.zeros(b, hv, k.shape[-1], dv, dtype=g.dtype, device=v.device)
    outs = [step_(state, q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i]) for i in range(t)]
    return torch.stack(outs, 1), state
