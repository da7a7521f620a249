"""Services that change places between repeats, so that a card's own speed is not taken for an arm's.

A position is one start of all services: at the next one each is freshly started in its next place. Which
card a service has is then no part of what a cell is; the set of its cards is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ddtree_ops.output import Output
from ddtree_ops.schemas.results import CellRotation, ReplicaAt

#: The replicas of a service at one position.
Seats = tuple[ReplicaAt, ...]


@dataclass(frozen=True)
class Rotation:
    """Where the services of a sweep will be.

    seats   by service: its replicas at each position
    move_s  what a move is expected to take, in seconds
    """

    seats: Mapping[str, tuple[Seats, ...]]
    move_s: float

    @property
    def positions(self) -> int:
        return len(next(iter(self.seats.values())))

    def of(self, service: str) -> CellRotation:
        """What a cell of the service is keyed by."""
        places = {seat.place for seats in self.seats[service] for seat in seats}
        return CellRotation(positions=self.positions, places=sorted(places))

    def places(self, service: str) -> list[str]:
        """For people: where the service is at each position."""
        return [", ".join(seat.place for seat in seats) for seats in self.seats[service]]


def short_places(places: str) -> str:
    """Several places in short, separated by commas."""
    return ", ".join(short_place(place) for place in places.split(", "))


def short_place(place: str) -> str:
    """`gpu-a/GPU-12345678`: as much of a UUID as tells cards apart."""
    host, slash, gpus = place.partition("/")
    return host + slash + "+".join(gpu[:12] for gpu in gpus.split("+"))


class Mover(Protocol):
    """Moves the services of a sweep."""

    def stands_at(self, position: int) -> bool:
        """Whether all services are in their places of this position; says nothing of when they started."""
        ...

    def move(self, position: int, out: Output) -> Mapping[str, str]:
        """Start every service freshly in its place of this position.

        Returns why a service does not serve there, by service; those that do are not in it. Blocks.
        """
        ...
