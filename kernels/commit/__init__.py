"""Commit of an accepted path by replay from the verify pass's stash."""

from __future__ import annotations

from ddtree_kernels.commit.naive import commit_naive

__all__ = ["commit_naive"]
