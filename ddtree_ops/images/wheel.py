"""Our own wheel, as it goes into images: from a checkout, or packed again from the installed package.

Equal sources give equal bytes: times, modes and the order of files are fixed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ddtree_ops
from ddtree_ops.errors import BadEnvironment
from ddtree_ops.images.pip import run_pip

DISTRIBUTION = "ddtree"
#: What a build reads: folders of packages and data, and the files that describe them.
SOURCES = ("ddtree_ops", "engine_patch", "kernels", "playbooks", "dockerfiles")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
#: The oldest time that a zip can hold.
EPOCH = (1980, 1, 1, 0, 0, 0)
SOURCE_DATE_EPOCH = "315532800"
#: Written by whoever installs a wheel.
INSTALLERS_OWN = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})


@dataclass(frozen=True)
class Wheel:
    path: Path
    version: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Wheel:
        return cls(path, path.name.split("-")[1], hashlib.sha256(path.read_bytes()).hexdigest())


def our_wheel(cache: Path, *, timeout_s: float = 300.0, checkout: Path | None = None) -> Wheel:
    """The wheel of this very ddtree, made once for each state of its sources and kept in `cache`.

    checkout  default: the one that this package lies in; without one the installed package is packed again
    Raises JobFailed, or BadEnvironment where neither is there.
    """
    root = checkout or find_checkout()
    files = dict(_sources(root) if root else _installed())
    folder = cache / "wheels" / _digest(files)[:32]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as draft:
            made = Path(draft) / "made"
            made.mkdir()
            if root:
                _build(files, made, Path(draft) / "source", timeout_s)
            else:
                _pack(files, made)
            if not folder.is_dir():  # someone else may have been faster
                made.rename(folder)
    return Wheel.of(next(folder.glob("*.whl")))


def find_checkout() -> Path | None:
    """The folder with setup.py that this package lies in; null for an installed package."""
    root = Path(ddtree_ops.__file__).resolve().parents[1]
    return root if all((root / name).is_file() for name in FILES) else None


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for name in FILES:
        yield name, root / name
    for source in SOURCES:
        for path in sorted((root / source).rglob("*")):
            relative = path.relative_to(root)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in relative.parts)
            if path.is_file() and not hidden:
                yield relative.as_posix(), path


def _installed() -> Iterator[tuple[str, Path]]:
    """The files of the wheel that was installed, by their names in it."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise BadEnvironment(
            "ddtree is neither a checkout nor installed", remedy="reinstall ddtree"
        ) from error
    for file in sorted(distribution.files or []):
        made_by_installer = file.parts[0].endswith(".dist-info") and file.name in INSTALLERS_OWN
        if file.parts[0] != ".." and file.suffix != ".pyc" and not made_by_installer:
            yield file.as_posix(), Path(str(distribution.locate_file(file)))


def _digest(files: dict[str, Path]) -> str:
    """sha256 over names and contents."""
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _build(files: dict[str, Path], made: Path, source: Path, timeout_s: float) -> None:
    """From a clean copy: a build in the checkout would pick up what earlier builds left there."""
    for name, path in files.items():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
    options = ["--no-build-isolation"] if _has_setuptools() else []
    env = {**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    command = ["wheel", "--no-deps", "--no-cache-dir", *options, "--wheel-dir", str(made), str(source)]
    run_pip(command, "build of ddtree's wheel", timeout_s=timeout_s, env=env)


def _has_setuptools() -> bool:
    """Whether setuptools is here in the version that pyproject.toml asks for; else pip fetches it."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def _pack(files: dict[str, Path], made: Path) -> None:
    version = importlib.metadata.version(DISTRIBUTION)
    info = f"{DISTRIBUTION}-{version}.dist-info"
    record = []
    with zipfile.ZipFile(
        made / f"{DISTRIBUTION}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
            archive.writestr(_entry(name), data)
        record.append(f"{info}/RECORD,,\n")
        archive.writestr(_entry(f"{info}/RECORD"), "".join(record))


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o100644 << 16
    return entry
