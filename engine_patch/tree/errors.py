"""What the tree core raises."""

from __future__ import annotations


class TreeInputError(ValueError):
    """An input that no tree, layout or calibration can be made of: says what was found and what is allowed."""
