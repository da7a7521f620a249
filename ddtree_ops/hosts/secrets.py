"""Secrets by reference: from a file that only its owner reads, or from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.cluster import Secret


def resolve_secret(
    secret: Secret | None, *, key: str, folder: Path, environment: Mapping[str, str] = os.environ
) -> str | None:
    """The value, or null where no secret is configured.

    key     for messages; values never get into one
    folder  that of cluster.yaml
    Raises BadInput for a file that others may read, that is empty or missing, and for an unset variable.
    """
    if secret is None:
        return None
    if secret.env is not None:
        value = environment.get(secret.env, "")
        if not value:
            raise BadInput(f"{key}: found no variable {secret.env}, allowed: one that is set and not empty")
        return value
    assert secret.file is not None
    return _from_file(folder / secret.file.expanduser(), key)


def _from_file(file: Path, key: str) -> str:
    try:
        mode = file.stat().st_mode & 0o777
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{key}: {file} cannot be read ({error})") from error
    if mode & 0o077:
        raise BadInput(f"{key}: {file}: found mode {mode:04o}, allowed: 0600", remedy=f"chmod 600 {file}")
    if not text or "\n" in text:
        raise BadInput(
            f"{key}: {file}: found {'nothing' if not text else 'several lines'}, allowed: one line"
        )
    return text
