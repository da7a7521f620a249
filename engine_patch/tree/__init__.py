"""The engine-neutral tree core: building, layout and acceptance of draft trees. Needs numpy only."""

from __future__ import annotations

from ddtree_engine.tree.accept import Accepted, chain_accept, tree_accept, walk
from ddtree_engine.tree.build import Builder, build_tree, chain_tree
from ddtree_engine.tree.calibration import Calibration, EdgeTable, load_calibration, parse_calibration
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.layout import (
    SglangEncoding,
    ancestor_mask,
    dfs_order,
    links,
    positions,
    reorder,
    sglang_encoding,
)
from ddtree_engine.tree.nodes import Tree, tree_of

__all__ = [
    "Accepted",
    "Builder",
    "Calibration",
    "EdgeTable",
    "SglangEncoding",
    "Tree",
    "TreeInputError",
    "ancestor_mask",
    "build_tree",
    "chain_accept",
    "chain_tree",
    "dfs_order",
    "links",
    "load_calibration",
    "parse_calibration",
    "positions",
    "reorder",
    "sglang_encoding",
    "tree_accept",
    "tree_of",
    "walk",
]
