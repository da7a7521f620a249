from __future__ import annotations

import pytest

from ddtree_ops.bench.loops import ends_in_loop


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_periodic_tail_is_a_loop(period: int) -> None:
    head = list(range(100, 120))
    tail = [n % period for n in range(max(24, 4 * period))]
    assert ends_in_loop(head + tail)


def test_short_runs_and_near_repeats_are_no_loop() -> None:
    assert not ends_in_loop([1, 2, 3] + [7] * 12)
    assert not ends_in_loop([])
    broken = [n % 5 for n in range(40)]
    broken[-6] = 99
    assert not ends_in_loop(broken)


def test_a_period_beyond_the_limit_is_no_loop() -> None:
    assert not ends_in_loop([n % 33 for n in range(33 * 4)])
    assert ends_in_loop([n % 33 for n in range(33 * 4)], max_period=33)


def test_a_loop_that_ended_is_no_loop() -> None:
    assert not ends_in_loop([5] * 100 + list(range(50)))
