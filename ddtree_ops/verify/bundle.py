"""The bundle: one folder of known files, packed so that the same content gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

from ddtree_ops.errors import BadEnvironment
from ddtree_ops.files import write_atomic

FOLDER = "ddtree-acceptance"
#: What may be in a bundle; anything else in the folder is a bug and stays behind.
ALLOWED = ("summary.json", "report.html", "kernels.json")
ALLOWED_BELOW = "results"


def members(folder: Path) -> list[Path]:
    """Files that go into the bundle, relative to the folder, in a fixed order."""
    found = [
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    ]
    return sorted(path for path in found if str(path) in ALLOWED or path.parts[0] == ALLOWED_BELOW)


def hashes(folder: Path) -> dict[str, str]:
    """sha256 (hex) of every file but the summary, by its name in the bundle."""
    return {
        path.as_posix(): hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in members(folder)
        if path.name != "summary.json"
    }


def pack(folder: Path, out: Path) -> None:
    """Write `out`, whole or not at all. Raises BadEnvironment when that fails."""
    buffer = io.BytesIO()
    # No time, owner or mode of this machine.
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in members(folder):
            data = (folder / path).read_bytes()
            entry = tarfile.TarInfo(f"{FOLDER}/{path.as_posix()}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    try:
        write_atomic(out, buffer.getvalue())
    except OSError as error:
        raise BadEnvironment(f"{out} could not be written: {error.strerror}") from error
