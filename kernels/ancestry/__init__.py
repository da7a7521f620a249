"""Who is whose ancestor: masks, bit rows, depths and convolution windows of a tree."""

from __future__ import annotations

from ddtree_kernels.ancestry.naive import (
    ancestor_bits_naive,
    ancestor_mask,
    chain_parents,
    depths,
    window_index,
)

__all__ = ["ancestor_bits_naive", "ancestor_mask", "chain_parents", "depths", "window_index"]
