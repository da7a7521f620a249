"""What a sweep prints at its end: one line a cell. Verdicts and pictures are `ddtree compare`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_ops.bench.plan import cell_name
from ddtree_ops.bench.runner import SweepOutcome
from ddtree_ops.bench.store import Store
from ddtree_ops.output import Output
from ddtree_ops.schemas.results import CellRecord, RequestRow, RequestStatus

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
    """
    good = [row for row in rows if row.status is RequestStatus.OK]
    steps = sum(row.verify_steps or 0 for row in good)
    tokens = sum(row.completion_tokens for row in good)
    seconds = sum(row.e2e_s or 0.0 for row in good)
    against_ar = record.parity[0] if record.parity else None
    return {
        "name": cell_name(record.spec),
        "key": record.key,
        "builder": record.spec.builder.value if record.spec.builder else None,
        "concurrency": record.spec.concurrency,
        "temperature": record.spec.temperature,
        "accept_length": tokens / steps if steps else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "parity": f"{against_ar.identical}/{against_ar.near_tie}/{against_ar.different}"
        if against_ar
        else None,
        "state": record.state.value,
        "reason": record.reason,
    }
