"""What a sweep prints at its end: one line a cell. Verdicts and pictures are `ddtree compare`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_ops.bench.plan import cell_name
from ddtree_ops.bench.runner import SweepOutcome
from ddtree_ops.bench.store import Store
from ddtree_ops.bench.throughput import Throughput, by_replica, service_rate
from ddtree_ops.output import Output
from ddtree_ops.schemas.results import CellRecord, RequestRow, RequestStatus
from ddtree_ops.services.rotation import short_place

REPLICA_COLUMNS = ("cell", "C", "T", "replica", "at", "requests", "in flight", "tok/s")
#: The parity column counts prompts: identical / near-ties / different.
COLUMNS = ("cell", "C", "T", "accept", "tok/s", "parity", "state")


def show_outcome(store: Store, outcome: SweepOutcome, out: Output) -> None:
    """Print a table of cells and the result line."""
    figures = [cell_figures(record, store.rows(record.key)) for record in outcome.cells]
    rows = [
        [
            figure["name"],
            figure["concurrency"],
            figure["temperature"],
            "-" if figure["accept_length"] is None else f"{figure['accept_length']:.2f}",
            "-" if figure["tokens_per_second"] is None else f"{figure['tokens_per_second']:.1f}",
            figure["parity"] or "-",
            figure["state"],
        ]
        for figure in figures
    ]
    out.table(f"Run {outcome.run.run_id}", COLUMNS, rows)
    if replicas := _replica_rows(figures):
        out.table("Replicas: tok/s while busy, and of the service", REPLICA_COLUMNS, replicas)
    good = len(outcome.cells) - len(outcome.bad)
    result = {
        "run_id": outcome.run.run_id,
        "results": str(store.root),
        "seconds": outcome.run.seconds,
        "cells": figures,
        "reused": outcome.reused,
        "not_run": outcome.not_run,
    }
    out.result(result, summary=f"{good} of {len(outcome.run.cells)} cells complete in {store.root}")


def cell_figures(record: CellRecord, rows: Sequence[RequestRow]) -> dict[str, Any]:
    """A cell's headline numbers over its good requests.

    accept_length      completion tokens over verify steps, from each request's own counters
    tokens_per_second  completion tokens over the requests' own time, of one stream
    service_tokens_per_second  what all replicas give together, and by `replicas`; null for a single process
    """
    good = [row for row in rows if row.status is RequestStatus.OK]
    steps = sum(row.verify_steps or 0 for row in good)
    tokens = sum(row.completion_tokens for row in good)
    seconds = sum(row.e2e_s or 0.0 for row in good)
    replicas = by_replica(rows)
    against_ar = record.parity[0] if record.parity else None
    return {
        "name": cell_name(record.spec),
        "key": record.key,
        "builder": record.spec.builder.value if record.spec.builder else None,
        "concurrency": record.spec.concurrency,
        "temperature": record.spec.temperature,
        "accept_length": tokens / steps if steps else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "service_tokens_per_second": service_rate(replicas),
        "replicas": [_replica(one) for one in replicas],
        "parity": f"{against_ar.identical}/{against_ar.near_tie}/{against_ar.different}"
        if against_ar
        else None,
        "state": record.state.value,
        "reason": record.reason,
    }


def _replica(one: Throughput) -> dict[str, Any]:
    return {
        "number": one.at.number,
        "host": one.at.host,
        "endpoint": one.at.endpoint,
        "cards": one.at.cards,
        "place": one.at.place,
        "requests": one.requests,
        "in_flight": one.in_flight,
        "tokens_per_second": one.tokens_per_second,
    }


def _replica_rows(figures: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A line for each replica of a service with several, and one for the service."""
    rows: list[list[Any]] = []
    for figure in figures:
        load = [figure["name"], figure["concurrency"], figure["temperature"]]
        if len(figure["replicas"]) < 2:
            continue
        for one in figure["replicas"]:
            where = [one["number"], short_place(one["place"]), one["requests"]]
            rows.append([*load, *where, _number(one["in_flight"]), _number(one["tokens_per_second"])])
        rows.append([*load, "all", "", "", "", _number(figure["service_tokens_per_second"])])
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
