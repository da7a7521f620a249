"""The base of an image, by digest: from cluster.yaml, from the lock file, or from the registry, once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.found import ImageFound
from ddtree_ops.images.context import Base
from ddtree_ops.images.events import ImageEvent, OnEvent, Step
from ddtree_ops.images.lock import locked_base, with_base
from ddtree_ops.schemas.cluster import Cluster, EngineKind
from ddtree_ops.schemas.images import ImagesLock, LockedBase

#: Has the Python that the CPU engine's wheels are for.
LOCAL_BASE = "python:3.11-slim-bookworm"


@dataclass(frozen=True)
class WantedBase:
    """A base as somebody names it. `digest` null: what the lock file, the host or the registry has."""

    name: str
    digest: str | None = None
    cuda: str | None = None


def wanted_base(cluster: Cluster) -> WantedBase:
    """image of cluster.yaml; its default is SGLang's, which the CPU engine has no use for."""
    image = cluster.image
    if cluster.engine is EngineKind.SGLANG:
        return WantedBase(image.base, image.digest, image.cuda)
    return WantedBase(image.base if "base" in image.model_fields_set else LOCAL_BASE, image.digest)


def known_base(wanted: WantedBase, lock: ImagesLock, engine: Engine | None) -> Base | None:
    """The base as far as it is known without a registry; null where only that can say.

    In order: the digest that is wanted, what the lock file has, an image of that name on the host. An image
    that came from no registry has no digest to be pinned by: its id takes that place.
    """
    locked = locked_base(lock, wanted.name)
    digest = wanted.digest or (locked.digest if locked else None)
    if digest:
        return Base(wanted.name, by_digest(wanted.name, digest), digest)
    if locked and locked.id:
        return Base(wanted.name, locked.id, locked.id, pullable=False)
    found = engine.image(wanted.name) if engine else None
    return None if found is None else _as_found(wanted.name, found)


def resolve_base(
    wanted: WantedBase, lock: ImagesLock, engine: Engine, *, on_event: OnEvent, timeout_s: float
) -> Base:
    """The base by digest; where nothing else knows that, by pulling the tag. Raises DockerFailure."""
    base = known_base(wanted, lock, engine)
    if base is not None:
        return base
    _pull(engine, wanted.name, on_event, timeout_s)
    found = engine.image(wanted.name)
    if found is None:
        raise DockerFailure(f"{engine.host}: {wanted.name} is not there after its pull", remedy="try again")
    return _as_found(wanted.name, found)


def require_base(engine: Engine, base: Base, *, on_event: OnEvent, timeout_s: float) -> None:
    """Have the base on the host that builds. Raises DockerFailure with a remedy."""
    if engine.image(base.reference) is not None:
        return
    if not base.pullable:
        raise DockerFailure(
            f"{engine.host}: the base {base.name} is not there, and no registry has {base.digest[:19]}",
            remedy="load it there (docker load), name a base that can be pulled, or take its entry out of "
            "images.lock.json: then what the host has under that name counts",
        )
    _pull(engine, base.reference, on_event, timeout_s)


def with_found(lock: ImagesLock, base: Base, cuda: str | None) -> ImagesLock:
    """The lock file with this base in it."""
    digest, identity = (base.digest, None) if base.pullable else (None, base.digest)
    return with_base(lock, LockedBase(name=base.name, digest=digest, id=identity, cuda=cuda))


def by_digest(name: str, digest: str) -> str:
    """`repository@sha256:...` of `repository:tag`; a registry's port is no tag."""
    repository, colon, tag = name.rpartition(":")
    return f"{repository if colon and '/' not in tag else name}@{digest}"


def _as_found(name: str, found: ImageFound) -> Base:
    digest = _registry_digest(name, found.digests)
    if digest is None:
        return Base(name, found.id, found.id, pullable=False)
    return Base(name, by_digest(name, digest), digest)


def _registry_digest(name: str, digests: Iterable[str]) -> str | None:
    """Of the repository that the name means; an image can have come from several."""
    repository = by_digest(name, "").removesuffix("@")
    found = (reference.partition("@") for reference in digests)
    return next((digest for of, _, digest in found if _plain(of) == _plain(repository)), None)


def _plain(repository: str) -> str:
    """Docker leaves out its own registry and library, or does not."""
    return repository.removeprefix("docker.io/").removeprefix("library/")


def _pull(engine: Engine, reference: str, on_event: OnEvent, timeout_s: float) -> None:
    on_event(ImageEvent(Step.BASE, engine.host, f"pull {reference}"))
    try:
        engine.pull(
            reference,
            on_line=lambda line: on_event(ImageEvent(Step.BASE, engine.host, line)),
            timeout_s=timeout_s,
        )
    except DockerFailure as failure:
        raise DockerFailure(
            failure.message,
            remedy=failure.remedy
            or "the host must reach the registry of image.base; else load the image there (docker load)",
            status=failure.status,
            timed_out=failure.timed_out,
        ) from failure
