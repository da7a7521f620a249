"""Who runs where: the replicas of a cluster with their GPUs and ports, and how arms change GPUs.

Deterministic: the same cluster.yaml on the same cards gives the same replicas. Pure: facts were read before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddtree_ops.deploy.turns import CannotExchange, rotation, turned_groups
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.facts import HostFacts
from ddtree_ops.schemas.cluster import Cluster, EngineKind, Service


class TooFewCards(BadInput):
    """A host has fewer cards than its services want: nothing can be placed there, whatever others have."""


#: What keeps a host from being laid out, whatever the others have.
CANNOT_PLACE = (TooFewCards, CannotExchange)


@dataclass(frozen=True)
class Card:
    """A GPU as far as placement goes; `numa` is -1 where the host has no such nodes."""

    uuid: str
    bus: str
    numa: int = -1


@dataclass(frozen=True)
class Replica:
    """One container of a service.

    index  counts the service's replicas on its host
    gpus   UUIDs, in the order of ranks; empty for the CPU engine
    """

    service: Service
    host: str
    index: int
    port: int
    gpus: tuple[str, ...] = ()

    def container(self, cluster: str) -> str:
        """The name of its container, unique on the host."""
        return f"{cluster}-{self.service.name}-{self.index}"

    @property
    def name(self) -> str:
        """For people: unique in the cluster."""
        return f"{self.service.name}-{self.index} on {self.host}"


def cards_of(facts: HostFacts) -> tuple[Card, ...]:
    """The host's GPUs in nvidia-smi's order, which is that of the bus."""
    nodes = facts.numa if len(facts.numa) == len(facts.gpus) else (-1,) * len(facts.gpus)
    return tuple(Card(gpu.uuid, gpu.bus, node) for gpu, node in zip(facts.gpus, nodes, strict=True))


def services_on(cluster: Cluster, host: str) -> list[Service]:
    """The services that have replicas on the host, as in the file."""
    return [service for service in cluster.services if service.hosts is None or host in service.hosts]


def lay_out(
    cluster: Cluster,
    hosts: Iterable[str],
    cards: Mapping[str, Sequence[Card]] | None = None,
    *,
    turn: int = 0,
) -> list[Replica]:
    """All replicas on the hosts, services in the file's order on each.

    cards  by host; needed for SGLang
    turn   how often replicas whose cards ddtree chose have moved on to the next card or group of cards
    Raises TooFewCards when a host has fewer cards than its services want, CannotExchange where they cannot
    move on.
    """
    found: list[Replica] = []
    for host in hosts:
        services = services_on(cluster, host)
        groups: dict[str, list[tuple[str, ...]]]
        if cluster.engine is EngineKind.REFERENCE:
            groups = {service.name: [()] * service.copies for service in services}
        else:
            groups = _choose(services, host, (cards or {}).get(host, ()), turn)
        for service in services:
            for index, gpus in enumerate(groups[service.name]):
                found.append(Replica(service, host, index, service.ports[index], tuple(gpus)))
    return found


def _choose(
    services: Sequence[Service], host: str, cards: Sequence[Card], turn: int
) -> dict[str, list[tuple[str, ...]]]:
    """Groups of UUIDs by service: what the file names first, then wide groups, then single cards."""
    _require_enough(services, host, cards)
    groups: dict[str, list[tuple[str, ...]]] = {}
    free = dict(enumerate(cards))
    for service in services:
        if service.gpus is not None:
            chosen = [free.pop(index).uuid for index in service.gpus]
            groups[service.name] = [
                tuple(chosen[start : start + service.tp]) for start in range(0, len(chosen), service.tp)
            ]
    for service in sorted((one for one in services if one.gpus is None), key=lambda one: -one.tp):
        groups[service.name] = [_take(free, service.tp) for _ in range(service.copies)]
    return _turned(services, groups, cards, free, turn) if turn else groups


def _turned(
    services: Sequence[Service],
    groups: dict[str, list[tuple[str, ...]]],
    cards: Sequence[Card],
    free: Mapping[int, Card],
    turn: int,
) -> dict[str, list[tuple[str, ...]]]:
    """Replicas whose cards ddtree chose move on over all cards that only they may have, in bus order."""
    moving = [one.name for one in services if one.gpus is None]
    seats = {(name, index): group for name in moving for index, group in enumerate(groups[name])}
    if not seats:
        return groups
    taken = {uuid for group in seats.values() for uuid in group} | {card.uuid for card in free.values()}
    going = [card for card in cards if card.uuid in taken]
    if all(len(group) == 1 for group in seats.values()):
        singles: list[tuple[str, ...]] = [(card.uuid,) for card in going]
        new = rotation(list(seats), singles, turn)
    else:
        by_uuid = {card.uuid: card for card in going}

        def take(left: dict[int, str], count: int) -> tuple[str, ...]:
            chosen = _take({number: by_uuid[uuid] for number, uuid in left.items()}, count)
            for number in [number for number, uuid in left.items() if uuid in chosen]:
                del left[number]
            return chosen

        new = turned_groups(seats, [card.uuid for card in going], take, turn)
    for (name, index), group in new.items():
        groups[name][index] = group
    return groups


def _require_enough(services: Sequence[Service], host: str, cards: Sequence[Card]) -> None:
    wanted = sum(service.copies * service.tp for service in services)
    if wanted > len(cards):
        raise TooFewCards(
            f"services: found {wanted} GPUs asked for on {host}, allowed: the {len(cards)} that it has",
            remedy="fewer replicas, or leave the host out of services.*.hosts (see `ddtree deploy check`)",
        )
    for service in services:
        for index in service.gpus or ():
            if index >= len(cards):
                key, allowed = f"services.{service.name}.gpus", f"0 to {len(cards) - 1}, the cards of {host}"
                raise TooFewCards.at(file=None, key=key, found=index, allowed=allowed)


def _take(free: dict[int, Card], count: int) -> tuple[str, ...]:
    """Cards of one NUMA node if one has enough (the tightest, so that wide gaps stay), else in bus order."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for index in sorted(free):
        nodes[free[index].numa].append(index)
    fitting = [members for members in nodes.values() if len(members) >= count]
    pool = (
        min(fitting, key=lambda members: (len(members), members)) if fitting and count > 1 else sorted(free)
    )
    return tuple(free.pop(index).uuid for index in pool[:count])
