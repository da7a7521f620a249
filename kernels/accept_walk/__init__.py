"""Which drafts the target agrees with."""

from __future__ import annotations

from ddtree_kernels.accept_walk.naive import accept_walk_naive

__all__ = ["accept_walk_naive"]
