"""Which image the containers of each host run: built and shipped, or one that is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.errors import BadEnvironment

Note = Callable[[str], None]
#: In a plan, for an image that does not exist yet.
NOT_YET = "sha256:not-built-yet"


@dataclass(frozen=True)
class PlannedImage:
    """id is null for an image that would be built or shipped."""

    id: str | None
    what: str


def planned_images(
    session: ClusterSession, hosts: Sequence[str], drivers: Mapping[str, str | None] | None = None
) -> dict[str, PlannedImage]:
    """What `up` would do about images, by host. Changes nothing.

    drivers  CUDA versions of the drivers, by host. Raises BadEnvironment for one that is too old.
    """
    if session.cluster.image.prebuilt is not None:
        there = prebuilt(session, hosts, "prebuilt", session.cluster.image.prebuilt)
        return {host: PlannedImage(identity, f"present {identity}") for host, identity in there.items()}
    from ddtree_ops.images.build import planned_image, require_cuda_of

    require_cuda_of(session.cluster, drivers or {}, hosts)
    links = {host: session.links[host] for host in hosts}
    if not links:
        return {}
    planned = planned_image(session.cluster, links, session.folder)
    return {host: PlannedImage(_identity(what), what) for host, what in planned.items()}


def ensure_images(
    session: ClusterSession,
    hosts: Sequence[str],
    note: Note,
    drivers: Mapping[str, str | None] | None = None,
) -> tuple[dict[str, str], int]:
    """Ids by host, building and shipping what is missing; and on how many hosts something changed."""
    if session.cluster.image.prebuilt is not None:
        return prebuilt(session, hosts, "prebuilt", session.cluster.image.prebuilt), 0
    from ddtree_ops.images.build import ensure_image, planned_image

    links = {host: session.links[host] for host in hosts}
    before = planned_image(session.cluster, links, session.folder)
    built = ensure_image(
        session.cluster,
        links,
        folder=session.folder,
        on_event=lambda event: note(str(event)),
        drivers=drivers,
    )
    return {host: image.id for host, image in built.items()}, sum(
        _identity(before[host]) is None for host in built
    )


def prebuilt(session: ClusterSession, hosts: Sequence[str], key: str, reference: str) -> dict[str, str]:
    """Ids by host of an image that was made elsewhere; `key` of `image` names it.

    Raises BadEnvironment naming the hosts that do not have it.
    """
    found = session.each(lambda host: session.engine(host).image(reference), hosts)
    missing = [host for host, image in found.items() if image is None]
    if missing:
        raise BadEnvironment(
            f"image.{key}: {reference} is not on {', '.join(missing)}",
            remedy="load it there (docker load), or leave the key out so that ddtree builds an image",
        )
    return {host: image.id for host, image in found.items() if image is not None}


def _identity(what: str) -> str | None:
    word = what.split()[-1] if what else ""
    return word if word.startswith("sha256:") else None
