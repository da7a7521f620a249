"""The pieces that target and drafter share: norms, rotary tables, attention, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Mlp:
    """SiLU-gated MLP; `gate_up` is [hidden, 2 * inner], gate columns first, `down` [inner, hidden]."""

    gate_up: Tensor
    down: Tensor

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + mlp(x), both [T, hidden]."""
        gate, up = torch.mm(x, self.gate_up).chunk(2, dim=-1)
        return torch.addmm(residual, functional.silu(gate).mul_(up), self.down)


@dataclass(frozen=True)
class Rotary:
    """cos and sin tables, float32 [positions, 1, rotary / 2], for the half-split rotary layout."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, theta: float, rotary_dim: int, positions: int) -> Rotary:
        """Tables for positions 0..`positions` - 1."""
        frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None, None] * frequencies
        return cls(angles.cos(), angles.sin())

    def at(self, positions: Tensor) -> Rotary:
        """The rows of `positions`, int64 [T]."""
        return Rotary(self.cos[positions], self.sin[positions])

    def span(self, start: int, stop: int) -> Rotary:
        """The rows start..stop - 1, without a copy."""
        return Rotary(self.cos[start:stop], self.sin[start:stop])

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first 2 * (rotary / 2) channels of x [T, heads, dim]; the rest passes."""
        half = self.cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        if x.shape[-1] > 2 * half:
            parts.append(x[..., 2 * half :])
        return torch.cat(parts, dim=-1).to(x.dtype)


def columns(*rows: Tensor) -> Tensor:
    """Projections [out, in] side by side as one [in, sum of outs], the faster layout for `torch.mm`."""
    return torch.cat(rows).t().contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension in float32, back in x's dtype; eps is a scalar."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Grouped-query attention.

    queries      [T, q_heads, dim], already scaled
    keys, values [kv_heads, N, dim]
    bias         float32 [T, N], 0 where a key is seen and -inf where not; None sees all

    Returns [T, q_heads * dim]. Softmax in float32.
    """
    width, heads, dim = queries.shape
    kv_heads, length = keys.shape[0], keys.shape[1]
    grouped = queries.view(width, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, -1, dim), keys.transpose(1, 2)).float()
    if bias is not None:
        scores = (scores.view(-1, width, length) + bias).view(kv_heads, -1, length)
    mixed = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)
    return mixed.view(kv_heads, -1, width, dim).permute(2, 0, 1, 3).reshape(width, heads * dim)
