"""Tokens a second of a service and of each of its replicas, from the requests that they answered.

A replica's rate is its completion tokens over the time in which it had at least one request: pauses while
other arms have their turn do not count, a last request that runs alone does. Replicas of a service are loaded
at the same time, so their rates add up to what the service gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddtree_ops.schemas.results import ReplicaAt, RequestRow, RequestStatus
from ddtree_ops.services.cards import merged

Span = tuple[float, float]


@dataclass(frozen=True)
class Throughput:
    """What one replica gave.

    at         which one, where; the last place of one that moved
    tokens     completion tokens of requests that came through
    busy_s     seconds with at least one request
    request_s  seconds of all requests together
    """

    at: ReplicaAt
    requests: int
    tokens: int
    busy_s: float
    request_s: float

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.busy_s if self.busy_s else None

    @property
    def in_flight(self) -> float | None:
        """Requests at the same time, on average while busy."""
        return self.request_s / self.busy_s if self.busy_s else None


def by_replica(rows: Iterable[RequestRow]) -> list[Throughput]:
    """By number; rows of a service that has no replicas are not counted."""
    found: dict[int, list[RequestRow]] = defaultdict(list)
    for row in rows:
        if row.replica is not None:
            found[row.replica.number].append(row)
    return [throughput_of(found[number]) for number in sorted(found)]


def throughput_of(rows: Sequence[RequestRow]) -> Throughput:
    """Of one replica, or of the replicas that were at one place after each other."""
    at = rows[-1].replica
    if at is None:
        raise ValueError("rows of no replica")
    good = [row for row in rows if row.status is RequestStatus.OK]
    return Throughput(
        at=at,
        requests=len(rows),
        tokens=sum(row.completion_tokens for row in good),
        busy_s=_length(_spans(rows)),
        request_s=sum(row.e2e_s or 0.0 for row in rows),
    )


def service_rate(replicas: Sequence[Throughput]) -> float | None:
    """Tokens a second of all replicas together; null where one has none."""
    rates = [replica.tokens_per_second for replica in replicas]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def share_together(rows: Iterable[RequestRow]) -> float | None:
    """Of the time in which any replica was busy: the share in which all of them were.

    Below 1 where a fast replica waited for a slow one; null for fewer than two replicas.
    """
    by_number: dict[int, list[RequestRow]] = defaultdict(list)
    for row in rows:
        by_number[row.number].append(row)
    if len(by_number) < 2:
        return None
    spans = [_spans(some) for some in by_number.values()]
    changes = sorted(
        (at, change) for some in spans for begin, end in some for at, change in ((begin, 1), (end, -1))
    )
    any_busy = all_busy = 0.0
    busy, before = 0, changes[0][0]
    for at, change in changes:
        any_busy += at - before if busy else 0.0
        all_busy += at - before if busy == len(spans) else 0.0
        busy, before = busy + change, at
    return all_busy / any_busy if any_busy else None


def _spans(rows: Iterable[RequestRow]) -> list[Span]:
    return merged((row.sent_at, row.sent_at + row.e2e_s) for row in rows if row.e2e_s)


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
