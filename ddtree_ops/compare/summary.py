"""The machine-readable summary of a run: ``summary.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.headline import CPU_NOTE, headline
from ddtree_ops.compare.layout_view import layout_rows, together_rows
from ddtree_ops.compare.measures import Measures
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.schemas.arms import Arm

SUMMARY_SCHEMA = 1


def build_summary(results: Path, run_id: str | None = None) -> dict[str, Any]:
    """Summarise a run (default: the store's latest) as plain JSON types.

    ``cells`` follow the plan's order. An interval is ``{"mean", "low", "high", "prompts"}``; ``mean`` is
    a ratio of sums, and ``low`` and ``high`` are null below five prompts. ``parity`` counts prompts against
    ``ar`` (else ``dflash``); its counts are null where nothing was compared.

    Raises:
        BadInput: the store can't be read.
    """
    return summarise(analyse(results, run_id))


def summarise(analysis: Analysis) -> dict[str, Any]:
    """As :func:`build_summary`, of a run that is analysed already."""
    run = analysis.results.run
    return {
        "schema": SUMMARY_SCHEMA,
        "run_id": run.run_id,
        "seconds": run.seconds,
        "headline": headline(analysis).text,
        "note": CPU_NOTE if analysis.on_cpu_engine else None,
        "cells": [_cell(item) for item in analysis.measures],
        "missing_cells": len(analysis.results.missing),
        "verdicts": [
            {
                "arm": item.cell.arm.value,
                "budget": item.cell.budget,
                "builder": item.cell.builder.value if item.cell.builder else None,
                "concurrency": item.cell.spec.concurrency,
                "temperature": item.cell.spec.temperature,
                "baseline": item.baseline.value,
                "metric": item.metric.value,
                "verdict": item.answer.value,
                "ratio": _ratio(item.ratio),
                "reason": item.reason,
            }
            for item in analysis.verdicts
        ],
        "best_budgets": [
            {
                "concurrency": item.load.concurrency,
                "temperature": item.load.temperature,
                "metric": item.metric.value,
                "budget": item.cell.budget,
                "builder": item.cell.builder.value if item.cell.builder else None,
                "picked_on_halves": list(item.picks),
                "verdict": item.answer.value,
                "ratio": _ratio(item.ratio),
            }
            for item in analysis.best
        ],
        "floors": [
            {
                "arm": floor.cell.arm.value,
                "budget": floor.cell.budget,
                "concurrency": floor.cell.spec.concurrency,
                "temperature": floor.cell.spec.temperature,
                "metric": floor.metric.value,
                "positions": floor.positions,
                "ratio": _ratio(floor.ratio),
                "low": floor.low,
                "high": floor.high,
            }
            for floor in analysis.floors
        ],
        "layouts": layout_rows(analysis.layouts),
        "side_by_side": together_rows(analysis.together),
        "checks": dict(analysis.checks),
        "origin": run.origin.model_dump(mode="json") if run.origin else None,
        "environment": run.environment.model_dump(mode="json"),
    }


def _cell(item: Measures) -> dict[str, Any]:
    cell, record = item.cell, item.cell.record
    return {
        "arm": cell.arm.value,
        "budget": cell.budget,
        "builder": cell.builder.value if cell.builder else None,
        "concurrency": cell.spec.concurrency,
        "temperature": cell.spec.temperature,
        "state": cell.record.state.value,
        "reason": cell.record.reason,
        "accept_length": _interval(item.accept_length),
        "tokens_per_second": item.tokens_per_second.value if item.tokens_per_second else None,
        "tokens_per_second_interval": _interval(item.tokens_per_second),
        "verify_steps": item.verify_steps,
        "completion_tokens": item.completion_tokens,
        "shadow_estimate": _interval(item.shadow_estimate),
        "spine_accept_length": item.spine_accept_length,
        "parity": _parity(item),
        "gates": _gates(item),
        "stage_ms_per_step": item.stage_ms,
        "cards": None if record.cards is None else [use.model_dump(mode="json") for use in record.cards],
        "cards_missing": record.cards_missing,
    }


def _parity(item: Measures) -> dict[str, Any]:
    parity = item.parity(Arm.AR) or item.parity(Arm.DFLASH)
    if parity is None:
        return {"reference": None, "identical": None, "near_tie": None, "different": None, "unknown": None}
    return {
        "reference": parity.reference.value,
        "identical": parity.identical,
        "near_tie": parity.near_tie,
        "different": parity.different,
        "unknown": parity.unknown,
    }


def _gates(item: Measures) -> dict[str, Any]:
    """Counters first, then the sealed gates by id as ``pass``, ``fail``, ``figure`` or ``skip``."""
    return {
        "steps_below_spine": item.steps_below_spine,
        "steps_scored": item.steps_scored,
        "tree_steps": item.tree_steps,
        "loops": item.loops,
        "empty": item.empty,
        "unstable": item.unstable,
        "failed_requests": len(item.cell.rows) - len(item.cell.ok_rows),
        "sealed": {gate.id: gate.status.value for gate in item.cell.record.gates},
    }


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"mean": interval.value, "low": interval.low, "high": interval.high, "prompts": interval.n}


def _ratio(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"ratio": interval.value, "low": interval.low, "high": interval.high, "prompts": interval.n}
