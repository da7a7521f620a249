"""Gated delta nets on one request: convolution along branches, plain decode step, commit by replay.

The tree form itself is `ddtree_kernels.tree_gdn.tree_gdn_wy`. What stands here computes the same as
`tree_conv_naive`, `gdn_step` and `commit_naive` of `ddtree_kernels`, in place and by whole rows, which on a
CPU is several times faster. A replay calls `decode` itself for every row (operations on several rows at
once round differently in their last lanes): a committed state is bit for bit what plain decoding makes of the
same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ddtree_kernels.tree_gdn import gates, l2_normalise
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Heads:
    """Sizes of one delta net: `keys` heads of `key_dim` serve `values` heads of `value_dim`."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def key_channels(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.keys * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_channels + self.values * self.value_dim


@dataclass(frozen=True)
class Weights:
    """A layer's own part: `conv` float32 [W, C], oldest tap first; `A_log`, `dt_bias` float32 [values]."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor


def convolve_chain(history: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution and SiLU of T rows in a row.

    history  [W - 1 + T, C], the carried rows and then the new ones;  weight  float32 [W, C], oldest tap first

    Returns float32 [T, C].
    """
    taps = weight.shape[0]
    rows = history.shape[0] - taps + 1
    out = history[:rows] * weight[0]
    for tap in range(1, taps):
        out.addcmul_(history[tap : tap + rows], weight[tap])
    return functional.silu(out, inplace=True)


def convolve_tree(history: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
    """The same for the Q nodes of a tree.

    windows  int64 [W, Q], rows of `history` [W - 1 + Q, C] that each node's taps meet, oldest tap first
    """
    out = history.index_select(0, windows[0]).float().mul_(weight[0])
    for tap in range(1, weight.shape[0]):
        out.addcmul_(history.index_select(0, windows[tap]), weight[tap])
    return functional.silu(out, inplace=True)


def split_heads(mixed: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [T, C] -> q, k [T, keys, key_dim], v [T, values, value_dim]; q, k normalised, q scaled."""
    rows, both = mixed.shape[0], 2 * heads.key_channels
    qk = l2_normalise(mixed[:, :both].view(rows, 2 * heads.keys, heads.key_dim))
    v = mixed[:, both:].view(rows, heads.values, heads.value_dim)
    return qk[:, : heads.keys] * heads.key_dim**-0.5, qk[:, heads.keys :], v


def per_value_head(rows: Tensor, heads: Heads) -> Tensor:
    """[T, keys, dim] -> [T, values, 1, dim]: a key head serves values / keys adjacent value heads."""
    return rows.repeat_interleave(heads.values // heads.keys, dim=1)[:, :, None]


def decode(
    state: Tensor, window: Tensor, qkv: Tensor, a: Tensor, b: Tensor, weights: Weights, heads: Heads
) -> Tensor:
    """Move a layer past one token, in place; its query [values, 1, key_dim] for `read`.

    state  float32 [values, value_dim, key_dim];  window  [W - 1, C]
    qkv  [1, C], before the convolution;  a, b  [1, values], the gates' inputs
    """
    history = torch.cat([window, qkv])
    q, k, v = split_heads(convolve_chain(history, weights.conv), heads)
    g, beta = gates(a, b, weights.A_log, weights.dt_bias)
    window.copy_(history[1:])
    advance(state, per_value_head(k, heads)[0], v[0], g.exp_()[0, :, None, None], beta[0, :, None])
    return per_value_head(q, heads)[0]


def advance(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
    """The gated delta rule, in place: decay, forget what the key recalls, write the value.

    k  [values, 1, key_dim];  v  [values, value_dim];  decay  [values, 1, 1];  beta  [values, 1]
    """
    state.mul_(decay)
    remembered = torch.bmm(k, state.transpose(1, 2))[:, 0]
    written = (v - remembered).mul_(beta)
    state.addcmul_(written[:, :, None], k)


def read(state: Tensor, q: Tensor) -> Tensor:
    """Output after a token: q [values, 1, key_dim] -> [values, value_dim]."""
    return torch.bmm(q, state.transpose(1, 2))[:, 0]


def replay(
    state: Tensor, window: Tensor, qkv: Tensor, a: Tensor, b: Tensor, weights: Weights, heads: Heads
) -> None:
    """Decode the accepted rows, stashed by a verify pass, in place: qkv [P, C], a and b [P, values]."""
    for row in range(qkv.shape[0]):
        one = slice(row, row + 1)
        decode(state, window, qkv[one], a[one], b[one], weights, heads)
