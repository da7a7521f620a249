"""Have one image on every host of a cluster: build it once where it is nowhere, carry it to where it lacks.

An image is known by its label `ddtree.context-hash`, the hash of all that goes in: a host that has one with
that hash has nothing to do. What is built stays under its tag until :func:`remove_images` takes it away, so
that an earlier version can come back.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.found import ImageFound
from ddtree_ops.errors import DdtreeError, JobFailed
from ddtree_ops.images.base import (
    WantedBase,
    known_base,
    require_base,
    resolve_base,
    wanted_base,
    with_found,
)
from ddtree_ops.images.context import (
    LABEL_CONTEXT,
    LABEL_IMAGE,
    Base,
    Recipe,
    engine_recipe,
    pack_context,
)
from ddtree_ops.images.cuda import require_cuda
from ddtree_ops.images.events import MIB, ImageEvent, OnEvent, Step, ignore
from ddtree_ops.images.lock import load_lock, save_lock, with_image
from ddtree_ops.images.packages import installed_packages
from ddtree_ops.images.places import cache_folder
from ddtree_ops.images.ship import ship_image
from ddtree_ops.images.wheel import our_wheel
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.images import LockedImage

WOULD_BUILD = "would build"
WOULD_SHIP = "would ship"
#: What images a cluster may have: the last part of their names.
REPOSITORIES = ("engine", "gateway")
Clock = Callable[[], float]


@dataclass(frozen=True)
class BuiltImage:
    """An image of ours on one host.

    id            `sha256:...`, what containers are made from
    base_digest   of the base's manifest, or its id where no registry has it
    cuda          the base's CUDA version; null where it has none
    wheel_sha256  of ddtree's own wheel; null for an image without it
    """

    id: str
    tag: str
    base_digest: str
    cuda: str | None
    wheel_sha256: str | None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """An image that shall be on hosts.

    repository  of its tag; the rest of that is the context's hash
    make        the recipe, once the base is known
    """

    repository: str
    base: WantedBase
    make: Callable[[Base], Recipe]

    def tag(self, recipe: Recipe) -> str:
        return f"{self.repository}:{recipe.context_hash[:12]}"


def ensure_image(
    cluster: Cluster,
    links: Mapping[str, HostLink],
    *,
    folder: Path,
    on_event: OnEvent = ignore,
    deadline_s: float | None = None,
    drivers: Mapping[str, str | None] | None = None,
    network: str | None = None,
    cache: Path | None = None,
    clock: Clock = time.monotonic,
) -> dict[str, BuiltImage]:
    """Have the engine's image on every host and return it by host; where it is already, nothing is done.

    drivers  by host, the driver's CUDA version (`HostFacts.cuda`): compared before anything is pulled
    For the rest see :func:`ensure`. Raises BadEnvironment when a driver is too old for the image.
    """
    require_cuda_of(cluster, drivers or {}, links)
    deadline_s = cluster.deadlines.build if deadline_s is None else deadline_s
    cache = cache or cache_folder()
    return ensure(
        wanted_image(cluster, cache),
        links,
        folder=folder,
        on_event=on_event,
        deadline_s=deadline_s,
        network=network,
        cache=cache,
        clock=clock,
    )


def planned_image(
    cluster: Cluster, links: Mapping[str, HostLink], folder: Path, *, cache: Path | None = None
) -> dict[str, str]:
    """By host what :func:`ensure_image` would do: `would build`, `would ship`, or `present sha256:...`."""
    return planned(wanted_image(cluster, cache or cache_folder()), links, folder)


def require_cuda_of(cluster: Cluster, drivers: Mapping[str, str | None], hosts: Iterable[str]) -> None:
    """The cluster's image against the drivers of these hosts. Raises BadEnvironment with a remedy."""
    cuda = wanted_base(cluster).cuda
    if cuda is not None:
        require_cuda(cuda, {host: drivers.get(host) for host in hosts})


def wanted_image(cluster: Cluster, cache: Path) -> Wanted:
    """The image of a cluster's engine."""
    base = wanted_base(cluster)

    def make(found: Base) -> Recipe:
        wheel = our_wheel(cache, timeout_s=cluster.deadlines.build)
        return engine_recipe(cluster.engine, found, wheel, cuda=base.cuda)

    return Wanted(repository(cluster.name, "engine"), base, make)


def repository(cluster: str, what: str) -> str:
    """Of the tags of a cluster's images."""
    return f"ddtree/{cluster}-{what}"


def ensure(
    wanted: Wanted,
    links: Mapping[str, HostLink],
    *,
    folder: Path,
    on_event: OnEvent = ignore,
    deadline_s: float,
    network: str | None = None,
    cache: Path | None = None,
    clock: Clock = time.monotonic,
) -> dict[str, BuiltImage]:
    """Have an image on every host and return it by host; where it is already, nothing is done.

    links       by host; if none has the image the first one that has the base builds it, else the first one
    folder      of cluster.yaml: the lock file lies there and is updated
    deadline_s  for all of it
    network     of build steps; `host` on engines without a bridge
    cache       of packages; default: the user's
    Raises DockerFailure with the build's last lines, HostUnreachable, JobFailed when the deadline is over.
    """
    if not links:
        return {}
    left = _Deadline(deadline_s, clock)
    engines = {host: link.engine() for host, link in links.items()}
    lock = load_lock(folder)
    first = next(iter(engines.values()))
    base = resolve_base(wanted.base, lock, first, on_event=on_event, timeout_s=left())
    recipe = wanted.make(base)
    tag = wanted.tag(recipe)
    found = {host: _find(one, recipe, tag) for host, one in engines.items()}
    source = next((host for host, image in found.items() if image is not None), None)
    source = source or _builder(engines, base)
    image = found[source]
    if image is None:
        require_base(engines[source], base, on_event=on_event, timeout_s=left())
        image = _build(recipe, tag, engines[source], cache or cache_folder(), network, on_event, left)
        found[source] = image
        lock = with_image(lock, _as_locked(image, tag, recipe))
    lock = with_found(lock, base, recipe.cuda)
    if lock != load_lock(folder):
        save_lock(folder, lock)
    ready = {}
    for host, present in found.items():
        if present is not None:
            identity = present.id
        else:
            identity = ship_image(
                image, tag, engines[source], engines[host], on_event=on_event, timeout_s=left()
            )
        on_event(ImageEvent(Step.PRESENT, host, f"{tag} {identity[:19]}"))
        wheel = recipe.wheel.sha256 if recipe.wheel else None
        ready[host] = BuiltImage(identity, tag, base.digest, recipe.cuda, wheel, image.labels)
    return ready


def planned(wanted: Wanted, links: Mapping[str, HostLink], folder: Path) -> dict[str, str]:
    """By host what :func:`ensure` would do: `would build`, `would ship`, or `present sha256:...`.

    Changes nothing on hosts and pulls nothing: with a base whose digest only the registry knows, nothing can
    be there yet. Raises HostUnreachable, DockerFailure, JobFailed.
    """
    engines = {host: link.engine() for host, link in links.items()}
    base = known_base(wanted.base, load_lock(folder), next(iter(engines.values()), None))
    found: dict[str, ImageFound | None] = dict.fromkeys(engines)
    if base is not None:
        recipe = wanted.make(base)
        found = {host: _with_hash(engine, recipe) for host, engine in engines.items()}
    somewhere = any(found.values())
    plan = {}
    for index, (host, image) in enumerate(found.items()):
        missing = WOULD_SHIP if somewhere or index else WOULD_BUILD
        plan[host] = f"present {image.id}" if image else missing
    return plan


def remove_images(
    cluster: str, links: Mapping[str, HostLink], *, keep: Collection[str] = ()
) -> dict[str, list[str]]:
    """Take the cluster's images off its hosts, and what builds left behind; return the tags by host.

    keep  ids (`sha256:...`) that stay: the running ones, and the previous ones for a rollback
    An image that a container still uses stays. Bases stay: they are not ours.
    """
    prefixes = tuple(f"{repository(cluster, what)}:" for what in REPOSITORIES)
    removed: dict[str, list[str]] = {}
    for host, link in links.items():
        engine = link.engine()
        unwanted = [image for image in engine.images(LABEL_IMAGE) if image.id not in keep]
        tags = [tag for image in unwanted for tag in image.tags if tag.startswith(prefixes)]
        removed[host] = [tag for tag in tags if _removed(engine, tag)]
        for image in unwanted:
            if not image.tags:
                _removed(engine, image.id)
    return removed


def _with_hash(engine: Engine, recipe: Recipe) -> ImageFound | None:
    return next(iter(engine.images(f"{LABEL_CONTEXT}={recipe.context_hash}")), None)


def _find(engine: Engine, recipe: Recipe, tag: str) -> ImageFound | None:
    """The image of the recipe, under its tag: that may be gone, or the image be another cluster's too."""
    image = _with_hash(engine, recipe)
    if image is not None and tag not in image.tags:
        engine.tag(image.id, tag)
    return image


def _builder(engines: Mapping[str, Engine], base: Base) -> str:
    """The first host that has the base, else the first host."""
    having = (host for host, engine in engines.items() if engine.image(base.reference) is not None)
    return next(having, next(iter(engines)))


def _build(
    recipe: Recipe,
    tag: str,
    engine: Engine,
    cache: Path,
    network: str | None,
    on_event: OnEvent,
    left: _Deadline,
) -> ImageFound:
    def say(step: Step, text: str) -> None:
        on_event(ImageEvent(step, engine.host, text))

    packages = None
    if recipe.pins:
        packages = installed_packages(
            recipe.pins, cache, note=lambda text: say(Step.PACKAGES, text), timeout_s=left()
        )
    try:
        with tempfile.TemporaryFile(dir=cache) as context:  # /tmp may be memory
            size = pack_context(recipe, packages, context)
            say(Step.BUILD, f"{tag} from {recipe.base.name}, context of {size / MIB:.0f} MiB")
            context.seek(0)
            identity = engine.build(
                context,
                tag=tag,
                args=recipe.args,
                labels={LABEL_CONTEXT: recipe.context_hash},
                network=network,
                on_line=lambda text: say(Step.BUILD, text),
                timeout_s=left(),
            )
    finally:
        with suppress(DdtreeError):  # an error that matters is on its way already
            _clean(engine, on_event)
    image = engine.image(identity)
    if image is None:
        raise DockerFailure(f"{engine.host}: {tag} is gone right after its build", remedy="try again")
    return image


def _clean(engine: Engine, on_event: OnEvent) -> None:
    """Remove what builds that failed left: untagged images of ours that nothing uses."""
    for image in _untagged(engine):
        if _removed(engine, image.id):
            on_event(ImageEvent(Step.CLEAN, engine.host, f"removed {image.id[:19]}, left by a build"))


def _untagged(engine: Engine) -> list[ImageFound]:
    return [image for image in engine.images(LABEL_IMAGE) if not image.tags]


def _removed(engine: Engine, reference: str) -> bool:
    """False where it was gone already, or something uses it."""
    try:
        return engine.remove_image(reference)
    except DockerFailure as failure:
        if failure.status == HTTPStatus.CONFLICT:
            return False
        raise


def _as_locked(image: ImageFound, tag: str, recipe: Recipe) -> LockedImage:
    return LockedImage(
        tag=tag,
        id=image.id,
        context_hash=recipe.context_hash,
        base=recipe.base.name,
        base_digest=recipe.base.digest,
        cuda=recipe.cuda,
        wheel_sha256=recipe.wheel.sha256 if recipe.wheel else None,
        version=recipe.wheel.version if recipe.wheel else None,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Deadline:
    """Called, the seconds that are left. Raises JobFailed when there are none."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._ends = clock() + seconds

    def __call__(self) -> float:
        left = self._ends - self._clock()
        if left <= 0:
            raise JobFailed(
                f"images: not done after {self._seconds:.0f} s",
                remedy="raise deadlines.build in cluster.yaml; what is built stays",
            )
        return left
