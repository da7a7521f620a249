"""What a verify pass leaves for its commit, and the buffers that its layers share.

Everything is allocated once, with the recurrent state pools, and written in place: a CUDA graph holds the
addresses. Rows are rows of the batch, as in the pass itself, so one pass's stash lives until the next pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from ddtree_kernels.tree_gdn.triton import MAX_HEAD_DIM, Scratch, verify_scratch
from torch import Tensor

WORD = 32


@dataclass(frozen=True)
class Layout:
    """One rank's gated delta nets and the most that a verify pass holds of them.

    rows        most requests in a pass, padding included
    width       Q, nodes a request
    key_heads, value_heads, key_dim, value_dim   H, HV, K, V
    taps        W of the convolution
    dtype       of the activations, which the stash keeps as they are
    """

    layers: int
    rows: int
    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """C: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def node_bytes(self) -> int:
        """Bytes that a node of a request takes, over all layers."""
        return self.layers * (self.channels + 2 * self.value_heads) * self.dtype.itemsize

    @property
    def shared_bytes(self) -> int:
        """Bytes of what the layers of a pass share, whatever their number."""
        words = self.width * (1 + -(-self.width // WORD))
        convolved = self.width * self.channels * self.dtype.itemsize
        scratch = sum(one.nbytes for one in self.scratch("meta"))
        return scratch + self.rows * (words * 4 + convolved)

    def scratch(self, device: torch.device | str) -> Scratch:
        """The verify kernel's buffers for all rows."""
        shape = (self.rows, self.width, self.value_heads, self.value_dim)
        return verify_scratch(torch.empty(1, device=device).expand(shape), self.key_dim)

    @property
    def total_bytes(self) -> int:
        """Bytes of a whole `Stash`."""
        return self.rows * self.width * self.node_bytes + self.shared_bytes


def layout_of(
    conv_shape: tuple[int, int],
    temporal_shape: tuple[int, int, int],
    *,
    layers: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Layout:
    """The layout from SGLang's pool shapes of one slot: (C, W - 1) and (HV, V, K).

    Raises `ValueError` where they are not a gated delta net's.
    """
    channels, carried = conv_shape
    value_heads, value_dim, key_dim = temporal_shape
    keys = channels - value_heads * value_dim
    if keys <= 0 or keys % (2 * key_dim) or value_heads % (keys // (2 * key_dim)):
        raise ValueError(
            f"found {channels} convolution channels with states {temporal_shape}, allowed are "
            "2 x key heads x key dim + value heads x value dim, value heads a multiple of key heads"
        )
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"found head dims {key_dim} and {value_dim}, allowed are up to {MAX_HEAD_DIM}")
    return Layout(
        layers=layers,
        rows=rows,
        width=width,
        key_heads=keys // (2 * key_dim),
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=carried + 1,
        dtype=dtype,
    )


@dataclass(frozen=True)
class Stash:
    """The buffers; R rows, Q nodes, L layers.

    x          [L, R, Q, C], a layer's q, k and v before its convolution
    a, b       [L, R, Q, HV], its gate projections
    parents    int32[R, Q], the pass's trees, set before it starts
    bits       int32[R, Q, ceil(Q / 32)], their ancestor bits, made by the pass's first layer
    convolved  [R, Q, C] and `scratch`: one layer's, used again by the next
    """

    layout: Layout
    x: Tensor
    a: Tensor
    b: Tensor
    parents: Tensor
    bits: Tensor
    convolved: Tensor
    scratch: Scratch

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        found = (getattr(self, field.name) for field in fields(self))
        tensors = [one for one in found if isinstance(one, Tensor)] + list(self.scratch)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def set_trees(self, parents: Tensor) -> None:
        """The trees of the next pass: int parents[N, Q], row 0 the root."""
        self.parents[: len(parents)].copy_(parents)

    def parents_seen(self, requests: int) -> Tensor:
        """int64[N, Q]: parents as the last pass's layers had them, from their ancestor bits; root -1.

        Parents come before their children, so a node's parent is its last ancestor before itself.
        """
        width = self.layout.width
        words = self.bits[:requests]
        place = torch.arange(WORD, device=words.device, dtype=torch.int32)
        ancestors = ((words[..., None] >> place) & 1).flatten(2)[..., :width].bool()
        rows = torch.arange(width, device=words.device)
        before = ancestors & (rows < rows[:, None])
        return torch.where(before, rows, -1).amax(-1)


def allocate(layout: Layout, device: torch.device | str) -> Stash:
    """Buffers for this layout. What a pass may read before anything wrote it holds zeros."""
    rows, width, heads = layout.rows, layout.width, layout.value_heads

    def kept(last: int) -> Tensor:
        return torch.zeros(layout.layers, rows, width, last, dtype=layout.dtype, device=device)

    x, a, b = kept(layout.channels), kept(heads), kept(heads)
    return Stash(layout=layout, x=x, a=a, b=b, **_of_a_pass(layout, device))


def narrow(stash: Stash, width: int) -> Stash:
    """A stash of fewer nodes a request, in the same memory: of the two only the last pass's holds.

    What the layers of a pass share is its own, so that zeros stay zeros: `shared_bytes` of its layout.
    """
    layout = replace(stash.layout, width=width)
    x, a, b = (_front(tensor, width) for tensor in (stash.x, stash.a, stash.b))
    return Stash(layout=layout, x=x, a=a, b=b, **_of_a_pass(layout, stash.x.device))


def _front(tensor: Tensor, width: int) -> Tensor:
    """The start of a dense [L, R, Q, last] as a dense [L, R, width, last]."""
    shape = (*tensor.shape[:2], width, tensor.shape[3])
    return tensor.view(-1)[: math.prod(shape)].view(shape)


def _of_a_pass(layout: Layout, device: torch.device | str) -> dict[str, Any]:
    rows, width, channels = layout.rows, layout.width, layout.channels

    def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "parents": buffer(rows, width, dtype=torch.int32),
        "bits": buffer(rows, width, -(-width // WORD), dtype=torch.int32),
        "convolved": buffer(rows, width, channels, dtype=layout.dtype),
        "scratch": layout.scratch(device),
    }
