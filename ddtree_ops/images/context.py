"""Everything that goes into an image: a recipe with a hash, and the tar that a build gets.

The hash is a label of the image. It covers the Dockerfile, our wheel byte for byte, the base by its digest,
the build arguments, and for the CPU engine the list of pinned packages (not their files: so a plan needs no
download, and two operators whose indexes hold different builds of one release agree). Equal hash: nothing to
build.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ddtree_ops.images.packages import LEFT_OUT, requirements_of
from ddtree_ops.images.places import dockerfiles_folder
from ddtree_ops.images.wheel import Wheel
from ddtree_ops.schemas.cluster import EngineKind

LABEL_CONTEXT = "ddtree.context-hash"
LABEL_WHEEL = "ddtree.wheel-sha256"
#: On every image of ours from its first layer on, so also on what a failed build leaves.
LABEL_IMAGE = "ddtree.image"
#: Changes when the meaning of the hash does.
CONTEXT_SCHEMA = 1
#: Of every file: 1980-01-01, the oldest that a zip can hold too.
MTIME = 315532800

Source = Path | bytes


@dataclass(frozen=True)
class Base:
    """What an image is built on.

    name       as in cluster.yaml
    reference  what FROM gets: by digest, or the id of an image that only the host has
    digest     `sha256:...` of the registry's manifest, or that id
    pullable   whether a registry has it
    """

    name: str
    reference: str
    digest: str
    pullable: bool = True


@dataclass(frozen=True)
class Recipe:
    """What an image is made of, before anything is fetched.

    kind        engine, local, gateway: the label `ddtree.image`
    wheel       ours; null for an image without it
    dockerfile  its text
    pins        NAME==VERSION of what goes in as `packages/`
    files       further files of the context, by their names in it
    cuda        the base's CUDA version; null where it has none
    """

    kind: str
    base: Base
    wheel: Wheel | None
    dockerfile: str
    pins: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    cuda: str | None = None

    @property
    def args(self) -> dict[str, str]:
        """The build's arguments."""
        args = {
            "BASE": self.base.reference,
            "BASE_NAME": self.base.name,
            "BASE_DIGEST": self.base.digest,
        }
        if self.wheel is not None:
            args |= {"VERSION": self.wheel.version, "WHEEL_SHA256": self.wheel.sha256}
        return args | ({"CUDA": self.cuda} if self.cuda else {})

    @property
    def context_hash(self) -> str:
        parts = {
            "schema": CONTEXT_SCHEMA,
            "kind": self.kind,
            "dockerfile": hashlib.sha256(self.dockerfile.encode()).hexdigest(),
            "args": self.args,
            "pins": sorted(self.pins),
            "left_out": sorted(LEFT_OUT) if self.pins else [],
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()},
        }
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def engine_recipe(kind: EngineKind, base: Base, wheel: Wheel, *, cuda: str | None = None) -> Recipe:
    """The recipe of an engine's image from the shipped Dockerfiles."""
    folder = dockerfiles_folder()
    if kind is EngineKind.SGLANG:
        text = (folder / "engine.Dockerfile").read_text(encoding="utf-8")
        return Recipe("engine", base, wheel, text, cuda=cuda)
    text = (folder / "local.Dockerfile").read_text(encoding="utf-8")
    pins = requirements_of((folder / "local-requirements.txt").read_text(encoding="utf-8"))
    return Recipe("local", base, wheel, text, tuple(pins))


def pack_context(recipe: Recipe, packages: Path | None, into: IO[bytes]) -> int:
    """Write the build's tar and return its size in bytes.

    packages  the folder of `installed_packages(recipe.pins, ...)`: with it our wheel goes in unpacked, beside
              them; without it the wheel goes in as it is
    """
    files: dict[str, Source] = {"Dockerfile": recipe.dockerfile.encode(), **recipe.files}
    if packages is not None:
        paths = (path for path in packages.rglob("*") if path.is_file())
        files.update({f"packages/{path.relative_to(packages).as_posix()}": path for path in paths})
    if recipe.wheel is not None:
        wheel = recipe.wheel.path
        files.update({wheel.name: wheel} if packages is None else _unpacked(wheel, "ddtree"))
    write_tar(files, into)
    return into.tell()


def _unpacked(wheel: Path, folder: str) -> dict[str, Source]:
    """Its files: a wheel of pure Python is installed by unpacking it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        return {f"{folder}/{name}": archive.read(name) for name in names}


def write_tar(files: Mapping[str, Source], into: IO[bytes]) -> None:
    """A tar whose bytes depend on names and contents alone."""
    with tarfile.open(fileobj=into, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for folder in _folders(files):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        for name, source in sorted(files.items()):
            if isinstance(source, bytes):
                tar.addfile(_entry(name, tarfile.REGTYPE, 0o644, len(source)), io.BytesIO(source))
                continue
            with source.open("rb") as file:
                mode = 0o755 if os.access(source, os.X_OK) else 0o644
                tar.addfile(_entry(name, tarfile.REGTYPE, mode, source.stat().st_size), file)


def _folders(names: Iterable[str]) -> list[str]:
    parents = {str(parent) for name in names for parent in Path(name).parents}
    return sorted(parents - {"."})


def _entry(name: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.mtime = kind, mode, size, MTIME
    return entry
