"""Which image the containers of each host run: built and shipped, or one that is there already."""

from __future__ import annotations

from collections.abc import Callable
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


def planned_images(session: ClusterSession) -> dict[str, PlannedImage]:
    """What `up` would do about images, by host. Changes nothing."""
    if session.cluster.image.prebuilt is not None:
        return {
            host: PlannedImage(identity, f"present {identity}")
            for host, identity in _prebuilt(session).items()
        }
    from ddtree_ops.images.build import planned_image

    links = {host: session.links[host] for host in session.hosts}
    planned = planned_image(session.cluster, links, session.folder)
    return {host: PlannedImage(_identity(what), what) for host, what in planned.items()}


def ensure_images(session: ClusterSession, note: Note) -> tuple[dict[str, str], int]:
    """Ids by host, building and shipping what is missing; and on how many hosts something changed."""
    if session.cluster.image.prebuilt is not None:
        return _prebuilt(session), 0
    from ddtree_ops.images.build import ensure_image

    before = {host: planned.id for host, planned in planned_images(session).items()}
    links = {host: session.links[host] for host in session.hosts}
    deadline = session.cluster.deadlines.build
    built = ensure_image(
        session.cluster,
        links,
        folder=session.folder,
        on_event=lambda event: note(str(event)),
        deadline_s=deadline,
    )
    found = {host: image.id for host, image in built.items()}
    return found, sum(before.get(host) != identity for host, identity in found.items())


def _prebuilt(session: ClusterSession) -> dict[str, str]:
    """Raises BadEnvironment naming the hosts that do not have it."""
    reference = session.cluster.image.prebuilt
    assert reference is not None
    found = session.each(lambda host: session.engine(host).image(reference))
    missing = [host for host, image in found.items() if image is None]
    if missing:
        raise BadEnvironment(
            f"image.prebuilt: {reference} is not on {', '.join(missing)}",
            remedy="load it there (docker load), or leave the key out so that ddtree builds an image",
        )
    return {host: image.id for host, image in found.items() if image is not None}


def _identity(what: str) -> str | None:
    word = what.split()[-1] if what else ""
    return word if word.startswith("sha256:") else None
