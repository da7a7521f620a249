"""Colours, markers and line styles of the pictures: each arm keeps its own in every picture.

Colours are Okabe and Ito's, which readers with colour-vision deficiencies can tell apart, with lighter
ones for a dark page. No picture relies on colour alone: markers and line styles differ too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddtree_ops.schemas.arms import Arm

#: Role -> (on a light page, on a dark page).
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1d1d1f", "#ececee"),
    "muted": ("#63636b", "#a3a3ad"),
    "grid": ("#dedee3", "#3a3a42"),
    "paper": ("#ffffff", "#16161a"),
    "ar": ("#6a6a72", "#b4b4bd"),
    "dflash": ("#c65400", "#f39a5b"),
    "shadow": ("#007e5c", "#3ccba0"),
    "ddtree": ("#0067a3", "#64bcf0"),
    "unsafe": ("#a8447f", "#e397c3"),
    "budget-1": ("#8cbfe0", "#2f6a92"),
    "budget-2": ("#5aa3d0", "#3f86b6"),
    "budget-3": ("#2f87bd", "#56a6d8"),
    "budget-4": ("#0067a3", "#7cc4ef"),
    "budget-5": ("#00486f", "#b4dffa"),
    "draft": ("#e69f00", "#e9ab25"),
    "build": ("#56b4e9", "#8ccdf1"),
    "verify": ("#0072b2", "#2f86bd"),
    "commit": ("#cc79a7", "#d795b9"),
}


@dataclass(frozen=True)
class Mark:
    """How a series is drawn besides its colour."""

    marker: str
    line: str
    filled: bool


MARKS: Mapping[Arm, Mark] = {
    Arm.AR: Mark("D", "-.", True),
    Arm.DFLASH: Mark("s", "--", True),
    Arm.SHADOW: Mark("^", ":", False),
    Arm.DDTREE: Mark("o", "-", True),
    Arm.UNSAFE: Mark("X", ":", True),
}

BUDGET_MARKERS = ("v", "o", "s", "D", "P")
BUILDER_MARKERS = ("p", "h")


@dataclass(frozen=True)
class Theme:
    """Role -> colour as matplotlib understands it."""

    colours: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        return self.colours[role]


#: For PNG files, which can't follow the page's scheme.
LIGHT = Theme({role: light for role, (light, _) in COLOURS.items()})

#: For inline SVG: stand-ins that :mod:`ddtree_ops.compare.svg` turns into CSS variables.
STAND_IN = Theme({role: f"#fe{index:02x}a7" for index, role in enumerate(COLOURS)})


def css_variables(dark: bool) -> str:
    """The body of a CSS rule that sets every role's variable."""
    return " ".join(f"--c-{role}: {pair[dark]};" for role, pair in COLOURS.items())
