"""Who is whose ancestor: masks, bit rows, depths and convolution windows of a tree."""

from __future__ import annotations

from ddtree_kernels.ancestry.naive import (
    DepthFirst,
    ancestor_bits_naive,
    ancestor_mask,
    chain_parents,
    depth_first_naive,
    depths,
    window_index,
)

__all__ = [
    "DepthFirst",
    "ancestor_bits_naive",
    "ancestor_mask",
    "chain_parents",
    "depth_first_naive",
    "depths",
    "window_index",
]
