"""The gateway's image: smg and our entry point, on a plain Python base."""

from __future__ import annotations

from pathlib import Path

from ddtree_ops.deploy.images import NOT_YET, prebuilt
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.gateway import entry_point
from ddtree_ops.images.base import LOCAL_BASE, WantedBase, wanted_base
from ddtree_ops.images.build import Wanted, ensure, planned, repository
from ddtree_ops.images.context import Base, Recipe
from ddtree_ops.images.events import OnEvent, ignore
from ddtree_ops.images.packages import requirements_of
from ddtree_ops.images.places import dockerfiles_folder
from ddtree_ops.schemas.cluster import Cluster, EngineKind

KIND = "gateway"
PREBUILT = "prebuilt_gateway"


def wanted_gateway_image(cluster: Cluster) -> Wanted:
    """The image of a cluster's gateways; changes with smg, our entry point and the base, not with ddtree."""
    rehearsal = cluster.engine is EngineKind.REFERENCE
    base = wanted_base(cluster) if rehearsal else WantedBase(LOCAL_BASE)
    return Wanted(repository(cluster.name, KIND), base, gateway_recipe)


def gateway_recipe(base: Base) -> Recipe:
    folder = dockerfiles_folder()
    return Recipe(
        KIND,
        base,
        wheel=None,
        dockerfile=(folder / "gateway.Dockerfile").read_text(encoding="utf-8"),
        pins=tuple(requirements_of((folder / "gateway-requirements.txt").read_text(encoding="utf-8"))),
        files={"entry_point.py": Path(entry_point.__file__).read_bytes()},
    )


def planned_gateway_images(session: ClusterSession, hosts: list[str]) -> dict[str, str]:
    """Ids by host, or a stand-in for an image that `up` would build or ship. Changes nothing.

    Raises BadEnvironment where an image that should be there is not.
    """
    ready = session.cluster.image.prebuilt_gateway
    if ready is not None:
        return prebuilt(session, hosts, PREBUILT, ready)
    links = {host: session.links[host] for host in hosts}
    found = planned(wanted_gateway_image(session.cluster), links, session.folder) if links else {}
    there = {host: what.partition("present ")[2] for host, what in found.items()}
    return {host: identity or NOT_YET for host, identity in there.items()}


def ensure_gateway_images(
    session: ClusterSession, hosts: list[str], on_event: OnEvent = ignore
) -> dict[str, str]:
    """Ids by host, building and shipping what is missing.

    Raises BadEnvironment where an image that should be there is not.
    """
    ready = session.cluster.image.prebuilt_gateway
    if ready is not None:
        return prebuilt(session, hosts, PREBUILT, ready)
    links = {host: session.links[host] for host in hosts}
    deadline = session.cluster.deadlines.build
    built = ensure(
        wanted_gateway_image(session.cluster),
        links,
        folder=session.folder,
        on_event=on_event,
        deadline_s=deadline,
    )
    return {host: image.id for host, image in built.items()}
