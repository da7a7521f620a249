"""Does an output degenerate into a loop? Small models do so anyway: it counts only beyond `ar`'s."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 32
MIN_REPEATS = 4
MIN_TOKENS = 24


def ends_in_loop(
    tokens: Sequence[int],
    *,
    max_period: int = MAX_PERIOD,
    min_repeats: int = MIN_REPEATS,
    min_tokens: int = MIN_TOKENS,
) -> bool:
    """Whether the tail repeats one period of at most `max_period` tokens.

    The periodic tail must hold at least `min_repeats` periods and `min_tokens` tokens, so that a run of four
    equal tokens (an indentation, a rule of dashes) is no loop, but eight repeats of a three-token line are.
    Time is O(len(tokens) * max_period).
    """
    count = len(tokens)
    for period in range(1, max_period + 1):
        needed = max(min_repeats * period, min_tokens)
        if needed > count:
            continue
        if all(tokens[i] == tokens[i - period] for i in range(count - needed + period, count)):
            return True
    return False
