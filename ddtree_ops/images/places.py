"""Where things lie: the Dockerfiles of this ddtree, and what is kept between builds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from ddtree_ops.errors import BadEnvironment


def dockerfiles_folder() -> Path:
    """Beside the package in a checkout, else a package of their own. Raises BadEnvironment."""
    checkout = Path(__file__).resolve().parents[2] / "dockerfiles"
    if (checkout / "engine.Dockerfile").is_file():
        return checkout
    spec = importlib.util.find_spec("ddtree_dockerfiles")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "engine.Dockerfile").is_file():
            return Path(folder)
    raise BadEnvironment("the Dockerfiles are not installed", remedy="reinstall ddtree")


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The user's cache of ddtree: wheels that images are made of. It may be removed at any time."""
    variables = os.environ if environment is None else environment
    root = variables.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ddtree"
