"""One recurrent layer of a verify pass, on our kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ddtree_engine.sglang_plugin.wy.stash import Stash
from ddtree_kernels.ancestry.triton import ancestor_bits
from ddtree_kernels.commit.stash import stash as keep
from ddtree_kernels.tree_conv.triton import tree_conv
from ddtree_kernels.tree_gdn.triton import tree_gdn_verify
from torch import Tensor

ACTIVATIONS = {"silu": "silu", "swish": "silu", None: None}


@dataclass(frozen=True)
class Weights:
    """A layer's parameters: weight [C, W], bias [C] or None, A_log and dt_bias [HV], and its activation."""

    weight: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str | None


def verify_layer(
    stash: Stash,
    index: int,
    weights: Weights,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
) -> Tensor:
    """Outputs of a layer for all nodes; the pools are only read, and the layer's inputs are stashed.

    index       the layer's place among the recurrent layers; layer 0 starts a pass
    x           [N * Q, C], q, k and v before the convolution, rows with any pitch; a, b  [N * Q, HV]
    conv_pool   [slots, C, W-1];  state_pool  [slots, HV, V, K]
    slots       int[N] or more, negative: padding without a prefix

    Returns [1, N * Q, HV, V] in x's dtype. No host synchronisation; all buffers but the result are the
    stash's. Raises `ValueError` where the inputs do not fit the stash.
    """
    layout = stash.layout
    width, channels, heads = layout.width, layout.channels, layout.value_heads
    rows = len(x) // width
    if x.shape[1] != channels or len(x) % width or rows > layout.rows:
        raise ValueError(
            f"verify pass: found inputs {list(x.shape)}, allowed are up to {layout.rows} x {width} rows of "
            f"{channels} channels"
        )
    if not x.dtype == a.dtype == b.dtype == layout.dtype:
        raise ValueError(
            f"verify pass: found inputs in {x.dtype}, {a.dtype} and {b.dtype}, allowed is {layout.dtype}"
        )
    keep(x, a, b, *(kept[index, :rows].view(len(x), -1) for kept in (stash.x, stash.a, stash.b)))
    x = x.view(rows, width, channels)
    a, b = a.view(rows, width, heads), b.view(rows, width, heads)
    parents, bits, slots = stash.parents[:rows], stash.bits[:rows], slots[:rows]
    if index == 0:
        ancestor_bits(parents, out=bits)
    mixed = tree_conv(
        x,
        conv_pool,
        slots,
        weights.weight,
        weights.bias,
        parents,
        activation=ACTIVATIONS[weights.activation],
        out=stash.convolved[:rows],
    )
    keys = layout.key_heads * layout.key_dim
    per_key_head = (rows, width, layout.key_heads, layout.key_dim)
    out = torch.empty(1, rows * width, heads, layout.value_dim, dtype=x.dtype, device=x.device)
    tree_gdn_verify(
        a,
        b,
        weights.A_log,
        weights.dt_bias,
        mixed[..., :keys].view(per_key_head),
        mixed[..., keys : 2 * keys].view(per_key_head),
        mixed[..., 2 * keys :].view(rows, width, heads, layout.value_dim),
        state_pool,
        slots,
        parents,
        bits=bits,
        out=out.view(rows, width, heads, layout.value_dim),
        scratch=stash.scratch,
    )
    return out
