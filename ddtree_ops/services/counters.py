"""Totals of SGLang's plugin over all requests, where the CPU engine has figures of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

NAMES = ("requests", "tree_kernel_requests", "below_spine")
SETTLE_S = 0.3
MOST_READS = 10

Info = Callable[[], Awaitable[Mapping[str, Any] | None]]
Sleep = Callable[[float], Awaitable[None]]


def tree_states(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `ddtree` block of each of SGLang's schedulers, from `/server_info`."""
    states = info.get("internal_states")
    found = [state.get("ddtree") for state in states or [] if isinstance(state, Mapping)]
    return [block for block in found if isinstance(block, Mapping)]


def totals_of(info: Mapping[str, Any]) -> dict[str, int] | None:
    """Over all schedulers since the start: requests in verified steps, those whose tree the recurrent kernels
    are seen to have run, those below their spine. Null for a server that keeps none.
    """
    states = [state for state in tree_states(info) if all(isinstance(state.get(name), int) for name in NAMES)]
    if not states:
        return None
    return {name: sum(int(state[name]) for state in states) for name in NAMES}


async def settled_totals(ask: Info, sleep: Sleep = asyncio.sleep) -> dict[str, int] | None:
    """Totals once they have stopped changing: SGLang copies them to the host now and then.

    ask  `/server_info` as it is now, null for a server that does not answer
    """
    last, seen = None, 0
    for _ in range(MOST_READS):
        info = await ask()
        found = None if info is None else totals_of(info)
        if found is None:
            return None
        seen = seen + 1 if found == last else 0
        if seen >= 2:
            return found
        last = found
        await sleep(SETTLE_S)
    return last


def growth(before: Mapping[str, int] | None, after: Mapping[str, int] | None) -> dict[str, int] | None:
    """What came between two readings; null where one is missing or the server was started anew."""
    if before is None or after is None or any(after[name] < before[name] for name in NAMES):
        return None
    return {name: after[name] - before[name] for name in NAMES}
