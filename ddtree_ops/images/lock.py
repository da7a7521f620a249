"""The lock file of images: read with errors that name the place, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from ddtree_ops.errors import BadEnvironment, BadInput, from_validation
from ddtree_ops.files import write_json
from ddtree_ops.images.places import dockerfiles_folder
from ddtree_ops.schemas.images import ImagesLock, LockedBase, LockedImage

LOCK_NAME = "images.lock.json"
#: Of images that were built; older ones are forgotten, which removes nothing from a host.
KEPT_IMAGES = 20


def load_lock(folder: Path) -> ImagesLock:
    """The lock file beside cluster.yaml, or the shipped one where there is none yet.

    Raises BadInput that names the file and the key, BadEnvironment when it cannot be read.
    """
    path = folder / LOCK_NAME
    return read_lock(path if path.exists() else dockerfiles_folder() / LOCK_NAME)


def read_lock(path: Path) -> ImagesLock:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadEnvironment(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(
            f"{path}: not JSON ({error})", remedy="restore it from version control, or remove it"
        ) from error
    if isinstance(content, dict) and content.get("schema") not in (None, 1):
        raise BadInput.at(
            file=path, key="schema", found=content["schema"], allowed="1", remedy="update ddtree"
        )
    try:
        return ImagesLock.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, file=path) from error


def save_lock(folder: Path, lock: ImagesLock) -> None:
    """Replace the lock file beside cluster.yaml. Raises BadEnvironment."""
    write_json(folder / LOCK_NAME, lock.model_dump(mode="json", by_alias=True))


def locked_base(lock: ImagesLock, name: str) -> LockedBase | None:
    return next((base for base in lock.bases if base.name == name), None)


def with_base(lock: ImagesLock, base: LockedBase) -> ImagesLock:
    """The lock with this base instead of what it had under that name."""
    others = [one for one in lock.bases if one.name != base.name]
    bases = sorted([*others, base], key=lambda one: one.name)
    return lock.model_copy(update={"bases": bases})


def with_image(lock: ImagesLock, image: LockedImage) -> ImagesLock:
    """The lock with this image first; others of the same tag give way."""
    others = [one for one in lock.images if one.tag != image.tag]
    return lock.model_copy(update={"images": [image, *others][:KEPT_IMAGES]})
