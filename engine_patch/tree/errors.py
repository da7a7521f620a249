"""What the tree core raises."""

from __future__ import annotations


class TreeInputError(ValueError):
    """An input that no tree, layout or calibration can be made of: what was found, what is allowed."""
