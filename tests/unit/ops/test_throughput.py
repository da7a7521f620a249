"""What a service with several replicas gives: rates over busy time, and how much of it was busy together."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.bench.throughput import by_replica, service_rate, share_together
from ddtree_ops.schemas.results import ReplicaAt, RequestRow, RequestStatus
from tests.support.ops import request_row


def row(number: int, begin: float, end: float, **changes: Any) -> RequestRow:
    """Eight tokens, from one second to another."""
    return request_row(
        sent_at=begin, e2e_s=end - begin, replica=ReplicaAt(number=number, host="a"), **changes
    )


def test_pauses_do_not_count_and_requests_at_the_same_time_count_once() -> None:
    """0 to 2 and 5 to 7, with two requests in flight for a second of the first span."""
    (one,) = by_replica([row(0, 0.0, 1.5), row(0, 0.5, 2.0), row(0, 5.0, 7.0)])
    assert one.busy_s == pytest.approx(4.0)
    assert one.tokens_per_second == pytest.approx(24 / 4)
    assert one.in_flight == pytest.approx(5 / 4)


def test_rates_of_replicas_add_up_and_a_failed_request_costs_time_but_gives_no_token() -> None:
    rows = [row(0, 0.0, 1.0), row(1, 0.0, 2.0), row(1, 2.0, 4.0, status=RequestStatus.FAILED)]
    found = by_replica(rows)
    assert [one.tokens_per_second for one in found] == [pytest.approx(8.0), pytest.approx(2.0)]
    assert service_rate(found) == pytest.approx(10.0)


def test_a_process_without_replicas_has_no_such_figures() -> None:
    assert by_replica([request_row()]) == []
    assert service_rate([]) is None
    assert share_together([request_row()]) is None


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, 0, 2), (1, 0, 2)], 1.0),
        ([(0, 0, 2), (1, 0, 4)], 0.5),
        ([(0, 0, 2), (1, 2, 4)], 0.0),
        ([(0, 0, 1), (0, 1, 4), (1, 3, 4), (1, 8, 12)], 0.125),
    ],
    ids=["together", "one waits", "in turn", "pause"],
)
def test_the_share_of_busy_time_in_which_all_were_busy(
    spans: list[tuple[int, float, float]], share: float
) -> None:
    assert share_together(row(*span) for span in spans) == pytest.approx(share)
