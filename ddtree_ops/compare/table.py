"""A table of text, as the report's template takes it."""

from __future__ import annotations

from dataclasses import dataclass

DASH = "–"


@dataclass(frozen=True)
class Table:
    """A table of text. ``left`` names the columns that hold words, the others hold numbers."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
