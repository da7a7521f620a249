"""The arms of a comparison and the budgets that they take."""

from __future__ import annotations

from enum import StrEnum

#: Budget B counts nodes without the root; the verify width is Q = B + 1.
BUDGETS: tuple[int, ...] = (7, 15, 31, 63, 127)


class Arm(StrEnum):
    """One way to decode. ``unsafe`` is the labelled ablation with leaking states: never in a verdict."""

    AR = "ar"
    DFLASH = "dflash"
    SHADOW = "shadow"
    DDTREE = "ddtree"
    UNSAFE = "unsafe"

    @property
    def takes_budget(self) -> bool:
        return self in {Arm.SHADOW, Arm.DDTREE, Arm.UNSAFE}

    @property
    def lossless(self) -> bool:
        return self is not Arm.UNSAFE


class Builder(StrEnum):
    """How a tree is grown from the drafter's candidates."""

    BEST_FIRST = "best-first"
    SPINE_FIRST = "spine-first"
    CALIBRATED = "calibrated"
