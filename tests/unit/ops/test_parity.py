from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ddtree_ops.bench.parity import Difference, Gap, compare, first_difference
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import Parity, ParityClass, RequestRow, RequestStatus
from tests.support.ops import request_row


class FixedProbe:
    """Answers every difference with one gap."""

    def __init__(self, gap: float | None) -> None:
        self.answer = Gap(gap, 1e-4)

    async def gap(self, difference: Difference) -> Gap:
        return self.answer


def judged(rows: Sequence[RequestRow], others: Sequence[RequestRow], gap: float | None = 2.0) -> Parity:
    return asyncio.run(compare(rows, others, Arm.AR, FixedProbe(gap)))  # type: ignore[arg-type]


def test_the_first_difference_is_found_with_its_prefix() -> None:
    assert first_difference("a", [1, 2, 3], [1, 2, 3]) is None
    found = first_difference("a", [1, 9, 9], [1, 2, 9])
    assert found == Difference("a", 1, (1,), 9, 2)


def test_an_output_that_stops_early_differs_where_it_stops() -> None:
    assert first_difference("a", [1], [1, 2]) == Difference("a", 1, (1,), None, 2)
    assert first_difference("a", [1, 2], [1]) == Difference("a", 1, (1,), 2, None)


@pytest.mark.parametrize(
    ("gap", "kind"),
    [(5e-5, "near_tie"), (1e-4, "near_tie"), (1.1e-4, "different"), (None, "unknown")],
)
def test_the_gap_decides_what_a_difference_is(gap: float | None, kind: str) -> None:
    found = judged([request_row(0, output=[1, 5])], [request_row(0, output=[1, 4])], gap)
    assert getattr(found, kind) == 1
    assert (found.findings[0].token, found.findings[0].reference_token) == (5, 4)


def test_stopping_early_is_different_whatever_the_gap() -> None:
    assert judged([request_row(0, output=[1])], [request_row(0, output=[1, 4])], 0.0).different == 1


def test_over_repeats_the_worst_finding_counts() -> None:
    rows = [request_row(0), request_row(0, repeat=1, output=[9])]
    others = [request_row(0), request_row(0, repeat=1)]
    found = judged(rows, others)
    assert (found.identical, found.different) == (0, 1)


def test_a_prompt_without_a_sound_pair_is_unknown() -> None:
    failed = request_row(0, status=RequestStatus.FAILED)
    assert judged([failed], [request_row(0)]).unknown == 1
    assert judged([request_row(0)], [failed]).unknown == 1
    assert judged([request_row(0)], []).findings[0].parity is ParityClass.UNKNOWN
