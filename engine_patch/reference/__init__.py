"""The CPU reference engine: a real hybrid target and DFlash drafter behind SGLang-shaped HTTP routes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def pair_path() -> Path:
    """Folder of the shipped test pair, holding `target/` and `drafter/`."""
    return Path(str(files("ddtree_engine.reference") / "pair"))


__all__ = ["pair_path"]
