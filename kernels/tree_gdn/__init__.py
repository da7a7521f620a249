"""Gated delta rule over a tree: states forked at every branch."""

from __future__ import annotations

from ddtree_kernels.tree_gdn.gates import gates, l2_normalise, recurrence
from ddtree_kernels.tree_gdn.naive import gdn_step, tree_gdn_naive, tree_gdn_verify_naive
from ddtree_kernels.tree_gdn.wy import tree_gdn_verify_wy, tree_gdn_wy

__all__ = [
    "gates",
    "gdn_step",
    "l2_normalise",
    "recurrence",
    "tree_gdn_naive",
    "tree_gdn_verify_naive",
    "tree_gdn_verify_wy",
    "tree_gdn_wy",
]
