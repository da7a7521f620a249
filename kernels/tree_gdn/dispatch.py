"""Which form of the verify kernel a shape takes: by what was measured, and the WY form until it was."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Form = Literal["wy", "scan"]
TABLE = "dispatch.json"


def choose_form(batch: int, width: int) -> Form:
    """The faster form for N requests of Q nodes, from the nearest shape of the shipped table.

    `dispatch.json` is written by `python -m ddtree_kernels.bench`. Its rows name the faster form at one batch
    and width; a shape takes the row with the smallest width and then batch that cover it, or the largest.
    """
    return form_in(_table(), batch, width)


def form_in(table: dict[str, Any], batch: int, width: int) -> Form:
    """`choose_form` from a table that is at hand."""
    rows = table["rows"]
    if not rows:
        return "wy"
    widths = sorted({row["width"] for row in rows})
    nearest = next((w for w in widths if w >= width), widths[-1])
    candidates = sorted((row for row in rows if row["width"] == nearest), key=lambda row: int(row["batch"]))
    chosen = next((row for row in candidates if row["batch"] >= batch), candidates[-1])
    return "scan" if chosen["form"] == "scan" else "wy"


@cache
def _table() -> dict[str, Any]:
    text = files("ddtree_kernels.tree_gdn").joinpath(TABLE).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
