"""Causal convolution along the ancestors of every node."""

from __future__ import annotations

from ddtree_kernels.tree_conv.naive import commit_window_naive, tree_conv_naive

__all__ = ["commit_window_naive", "tree_conv_naive"]
