"""What the checked wrappers raise."""

from __future__ import annotations


class KernelInputError(ValueError):
    """A tensor that an operation cannot take: says which one, what was found and what is allowed."""
