"""Trees and layer inputs for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHAPES = ["random", "chain", "star", "bushy", "padded"]


def parents_of(shape: str, batch: int, width: int, seed: int = 0) -> Tensor:
    """int64[batch, width] of one kind of tree; `padded` ends in rows without a parent."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.arange(width).expand(batch, width) - 1
    parents = parents.clone()
    for row in range(1, width):
        low, high = {
            "random": (0, row),
            "padded": (0, row),
            "chain": (row - 1, row),
            "star": (0, 1),
            "bushy": (max(0, row - 4), row),
        }[shape]
        parents[:, row] = torch.randint(low, high, (batch,), generator=generator)
    if shape == "padded":
        parents[:, width - width // 4 :] = -1
    return parents


def path_to(parents: Tensor, node: int) -> list[int]:
    """Rows from the root to `node` in one request's parents [Q]."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node]) if node else -1
    return path[::-1]


@dataclass(frozen=True)
class Layer:
    """Raw inputs of one gated delta net layer for a batch of trees, and the pools they continue."""

    x: Tensor  # [N, Q, C] before the convolution
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    weight: Tensor
    bias: Tensor | None
    conv_pool: Tensor
    state_pool: Tensor
    slots: Tensor
    parents: Tensor
    key_heads: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, HV, K, V."""
        _, value_heads, value_dim, key_dim = self.state_pool.shape
        return self.key_heads, value_heads, key_dim, value_dim

    def qkv(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., C] into q, k [..., H, K] and v [..., HV, V]."""
        heads, value_heads, key_dim, value_dim = self.sizes
        q, k, v = mixed.split([heads * key_dim, heads * key_dim, value_heads * value_dim], dim=-1)
        return (
            q.unflatten(-1, (heads, key_dim)),
            k.unflatten(-1, (heads, key_dim)),
            v.unflatten(-1, (value_heads, value_dim)),
        )

    def verify_args(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Arguments of the verify forms, for convolved inputs [N, Q, C]."""
        q, k, v = self.qkv(mixed)
        gates = (self.a, self.b, self.A_log, self.dt_bias)
        return (*gates, q, k, v, self.state_pool, self.slots, self.parents)

    def to(self, dtype: torch.dtype) -> Layer:
        changes = {
            name: getattr(self, name).to(dtype)
            for name in ("x", "a", "b", "A_log", "dt_bias", "weight", "conv_pool", "state_pool")
        }
        return replace(self, bias=None if self.bias is None else self.bias.to(dtype), **changes)


def layer(
    shape: str = "random",
    batch: int = 2,
    width: int = 12,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 8,
    window: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    bias: bool = True,
    decay: float | None = None,
    correlation: float = 0.0,
    slots: list[int] | None = None,
) -> Layer:
    """Random inputs.

    `decay` fixes the log decay of every node, `correlation` mixes one direction into all keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    channels = 2 * heads * key_dim + value_heads * value_dim
    a, A_log, dt_bias = rand(batch, width, value_heads), rand(value_heads) * 0.5, rand(value_heads)
    if decay is not None:  # -exp(A_log) softplus(large) = -exp(A_log) large
        a, dt_bias = torch.full_like(a, 25.0), torch.zeros_like(dt_bias)
        A_log = torch.full_like(A_log, -decay / 25.0).log()
    x = rand(batch, width, channels)
    if correlation:
        keys = slice(heads * key_dim, 2 * heads * key_dim)
        common = rand(heads * key_dim)
        x[..., keys] = correlation**0.5 * common + (1 - correlation) ** 0.5 * x[..., keys]
    made = Layer(
        x=x,
        a=a,
        b=rand(batch, width, value_heads) + (3.0 if correlation else 0.0),
        A_log=A_log,
        dt_bias=dt_bias,
        weight=rand(channels, window),
        bias=rand(channels) if bias else None,
        conv_pool=rand(batch + 3, channels, window - 1),
        state_pool=rand(batch + 3, value_heads, value_dim, key_dim),
        slots=torch.tensor(slots if slots is not None else [2 + batch - n for n in range(batch)]),
        parents=parents_of(shape, batch, width, seed),
        key_heads=heads,
    )
    return made.to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected; NaN anywhere fails."""
    assert not found.isnan().any(), "NaN: an element was never written, or 0 * inf"
    expected = expected.to(torch.float64)
    return float((found.to(torch.float64) - expected).norm() / expected.norm().clamp_min(1e-300))
