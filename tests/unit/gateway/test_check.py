"""What is read out of smg's metrics."""

from __future__ import annotations

import pytest

from ddtree_ops.gateway.check import GatewayState, WorkerState, parse_workers

METRICS = """
# TYPE smg_worker_health gauge
smg_worker_health{worker="http://127.0.0.1:1"} 1
smg_worker_health{worker="http://127.0.0.1:2"} 0
# TYPE smg_worker_requests_active gauge
smg_worker_requests_active{worker="http://127.0.0.1:1"} 3
# TYPE smg_worker_requests_total counter
smg_worker_requests_total{worker="http://127.0.0.1:1",model="target"} 7
smg_worker_requests_total{worker="http://127.0.0.1:1",model="alias"} 2
# TYPE smg_worker_cb_state gauge
smg_worker_cb_state{worker="http://127.0.0.1:1"} 1
smg_worker_cb_state{worker="http://127.0.0.1:3"} 0
"""


def test_replicas_are_read_from_the_metrics() -> None:
    workers = parse_workers(METRICS)
    assert workers == {
        "http://127.0.0.1:1": WorkerState("http://127.0.0.1:1", True, running=3, sent=9, breaker="open"),
        "http://127.0.0.1:2": WorkerState("http://127.0.0.1:2", False),
    }
    assert not any(worker.usable for worker in workers.values())


def test_the_summary_counts_what_can_be_used() -> None:
    workers = (WorkerState("u", True, running=2), WorkerState("v", False, running=1))
    assert GatewayState(True, workers, ()).summary == "1 of 2 replicas, 3 running"


def test_text_that_is_no_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nvalid|Duplicate|Unmatched|could not"):
        parse_workers("<html>\n{")
