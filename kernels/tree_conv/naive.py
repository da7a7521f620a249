"""Causal depthwise convolution over a tree: every node's window runs through its own ancestors."""

from __future__ import annotations

import torch
from ddtree_kernels.ancestry import window_index
from torch import Tensor


def tree_conv_naive(
    x: Tensor,
    conv_pool: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    *,
    activation: str | None = "silu",
    index: Tensor | None = None,
) -> Tensor:
    """Convolve every node with the W - 1 inputs before it on its path.

    x          [N, Q, C], a layer's pre-convolution inputs (for gated delta nets q, k and v side by side)
    conv_pool  [slots, C, W-1], inputs carried from the prefix, oldest first
    slots      int[N], the requests' rows of the pool; negative: no prefix (zeros)
    weight     [C, W], tap W-1 meets the node itself;  bias  [C] or None
    parents    int[N, Q], see `ddtree_kernels.ancestry`
    index      `window_index(parents, W)` when the caller has it already (it is the same for all layers)

    Returns [N, Q, C] in x's dtype; sums are float32 (float64 for float64 input).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    channels, taps = weight.shape
    if index is None:
        index = window_index(parents, taps)
    history = torch.cat([_carried(conv_pool, slots).to(x.dtype), x], dim=1)
    batch, width = x.shape[:2]
    rows = index.reshape(batch, width * taps, 1).expand(-1, -1, channels)
    windows = history.gather(1, rows).view(batch, width, taps, channels).to(compute)
    out = (windows * weight.T.to(compute)).sum(dim=2)
    if bias is not None:
        out = out + bias.to(compute)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    return out.to(x.dtype)


def commit_window_naive(x: Tensor, conv_pool: Tensor, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Move the carried inputs of every request past its accepted nodes, in place.

    x       [N, Q, C], the verified nodes' pre-convolution inputs
    path    int[N, P], accepted rows in order, root first; entries from `counts` on are not read
    counts  int[N], accepted rows, 0..P
    """
    carried = conv_pool.shape[-1]
    for request, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        if slot < 0 or count == 0:
            continue
        accepted = x[request, path[request, :count].long()].T.to(conv_pool.dtype)
        conv_pool[slot] = torch.cat([conv_pool[slot], accepted], dim=-1)[:, -carried:]


def _carried(conv_pool: Tensor, slots: Tensor) -> Tensor:
    windows = conv_pool[slots.clamp_min(0).long()].transpose(1, 2)
    return torch.where((slots >= 0)[:, None, None], windows, torch.zeros_like(windows))
