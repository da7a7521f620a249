"""How replicas go around the cards of a host: single cards one by one, groups of cards as groups.

With a replica over several cards the unit is a block of as many cards as the widest replica has. What lies
on a block (one wide replica, several narrow ones, or nothing) moves to the next block as a whole, and once it
was on every block, narrow replicas move on within theirs. So a group stays a group of cards that ddtree chose
to go together, and no two replicas meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddtree_ops.errors import BadInput

T = TypeVar("T")
U = TypeVar("U")

#: A replica by its service and number, and the cards that it has.
Seat = tuple[str, int]
Group = tuple[str, ...]


class CannotExchange(BadInput):
    """Groups of cards that replicas cannot exchange."""


@dataclass(frozen=True)
class Block:
    """Cards that are exchanged as a whole, those of a narrow replica side by side.

    starts  where the cards of each replica begin, before any turn
    """

    cards: Group
    starts: Mapping[Seat, int]


def rotation(arms: Sequence[T], places: Sequence[U], repeat: int) -> dict[T, U]:
    """Which place an arm has in a repeat, counted from 0.

    Over `len(places)` repeats in a row every arm has every place once, so that no arm owns a fast card; no
    two arms share one in a repeat. Raises ValueError for more arms than places.
    """
    if len(arms) > len(places):
        raise ValueError(f"{len(arms)} arms do not fit on {len(places)} places")
    return {arm: places[(position + repeat) % len(places)] for position, arm in enumerate(arms)}


def turned_groups(
    seats: Mapping[Seat, Group], cards: Sequence[str], take: Callable[[dict[int, str], int], Group], turn: int
) -> dict[Seat, Group]:
    """The cards of each replica that may move, after so many turns.

    seats  the replicas with their cards before any turn; `cards` all that they and nobody else have, in bus
           order
    take   chooses cards for a group from those that are left (by their place in bus order) and removes them
    Raises CannotExchange where a replica's cards lie in no block.
    """
    width = max((len(group) for group in seats.values()), default=1)
    blocks = _blocks(seats, cards, take, width)
    found: dict[Seat, Group] = {}
    rounds, shift = divmod(turn, len(blocks))
    for position, block in enumerate(blocks):
        there = blocks[(position + shift) % len(blocks)].cards
        narrow = [len(seats[seat]) for seat in block.starts if len(seats[seat]) < width]
        # As far as the widest of the narrow ones is, so that their groups stay whole.
        within = rounds * max(narrow, default=0)
        for seat, start in block.starts.items():
            count = len(seats[seat])
            first = (start + within) % width
            found[seat] = there[first : first + count]
    return found


def _blocks(
    seats: Mapping[Seat, Group],
    cards: Sequence[str],
    take: Callable[[dict[int, str], int], Group],
    width: int,
) -> list[Block]:
    """The wide replicas' groups, and as many more as the other cards make, in bus order."""
    index = {card: number for number, card in enumerate(cards)}
    wide = [group for group in seats.values() if len(group) == width]
    left = {index[card]: card for card in cards if not any(card in group for group in wide)}
    made = list(wide)
    while len(left) >= width:
        made.append(take(left, width))
    made.sort(key=lambda group: min(index[card] for card in group))
    blocks = [_block(group, seats) for group in made]
    settled = {seat for block in blocks for seat in block.starts}
    for seat in seats:
        if seat not in settled:
            name = seat[0]
            raise CannotExchange(
                f"services.{name}: its cards cannot be exchanged with a group of {width}: found "
                f"{', '.join(seats[seat])}, which lie in none of the {len(blocks)} groups of {width} cards",
                remedy="name its cards (`gpus`), so that they stay, or give all services one `tp`; "
                "`ddtree deploy up --rotate 0` undoes turns",
            )
    return blocks


def _block(group: Group, seats: Mapping[Seat, Group]) -> Block:
    """A block with its replicas, wide ones first: widths are powers of two, so each begins at a multiple."""
    inside = [seat for seat, mine in seats.items() if set(mine) <= set(group)]
    inside.sort(key=lambda seat: -len(seats[seat]))
    cards: list[str] = []
    starts: dict[Seat, int] = {}
    for seat in inside:
        starts[seat] = len(cards)
        cards += seats[seat]
    return Block((*cards, *(card for card in group if card not in cards)), starts)
