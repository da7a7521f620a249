"""The order of sending: every arm meets every prompt under like conditions.

At concurrency 1 a round is one prompt over all cells, and the cell that goes first rotates from round to
round, so that slow drift (heat, other tenants) and the after-effects of a neighbour hit all cells alike. At
higher concurrency a round is one pass of a cell over all prompts, and passes rotate in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items in cyclic order, beginning with number `by` (modulo their count)."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


def prompt_rounds(prompts: int, repeats: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """(round, repeat, prompt index) at concurrency 1; rounds count over all repeats from the first on."""
    for repeat in repeats:
        for index in range(prompts):
            yield repeat * prompts + index, repeat, index
