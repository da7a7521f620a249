"""Files that appear whole or not at all, also when the power goes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadEnvironment


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object, replacing what was there. Raises BadEnvironment when that fails."""
    try:
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise BadEnvironment(f"{path} could not be written: {error.strerror}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename. Raises OSError and leaves nothing behind then."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(draft, data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write and wait until the data is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
