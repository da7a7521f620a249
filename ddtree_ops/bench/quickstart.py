"""`ddtree quickstart`: every arm on this machine, one sweep, one report, one summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.bench.dataset import PAIR
from ddtree_ops.bench.runner import require_good
from ddtree_ops.bench.sweep import describe, execute, prepare, show_plan
from ddtree_ops.errors import JobFailed
from ddtree_ops.files import write_json
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.sweep import ArmChoice, LocalEngine, Sweep
from ddtree_ops.services.foreground import require_engine

PROMPTS = 8
MAX_TOKENS = 48
BUDGETS = [7, 15, 31, 63]
#: One budget shows that spine-first trees never fall below their spine and that leaked states are wrong.
SIDE_BUDGET = 31
#: The ends of the range: whatever the budget, shadow verifies the chain and takes its time.
SHADOW_BUDGETS = [7, 63]


@dataclass(frozen=True)
class QuickstartOptions:
    out: Path
    dataset: str | None = None
    prompts: int | None = None
    max_tokens: int | None = None
    model: Path | None = None
    drafter: Path | None = None
    command: list[str] | None = None


def run_quickstart(
    options: QuickstartOptions,
    out: Output,
    *,
    dry_run: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any] | None:
    """Sweep, report, summarise; returns the summary (null after a dry run).

    Leaves OUT/results, OUT/report/index.html and OUT/summary.json.
    Raises what a sweep raises; JobFailed when a cell is no result or a check is false, with everything
    written.
    """
    started = clock()
    prepared = prepare(quickstart_sweep(options))
    results = options.out / "results"
    if dry_run:
        show_plan(describe(prepared, results), out)
        return None
    if options.command is None:
        require_engine()
    out.note(f"{len(prepared.plan.cells)} cells on {len(prepared.plan.services)} services of this machine")
    store, outcome = execute(prepared, results, out)
    # pandas and matplotlib take seconds to import: only now, when nothing is timed any more.
    from ddtree_ops.compare.report import write_report
    from ddtree_ops.compare.summary import build_summary

    report = write_report(
        store.root, options.out / "report", title="ddtree quickstart", run_id=outcome.run.run_id
    )
    summary = build_summary(store.root, outcome.run.run_id)
    summary |= {"sweep_seconds": outcome.run.seconds, "seconds": round(clock() - started, 1)}
    summary["report"] = str(report.index)
    write_json(options.out / "summary.json", summary)
    show_summary(summary, report.index, out)
    require_good(outcome)
    require_checks(summary["checks"])
    return summary


def quickstart_sweep(options: QuickstartOptions) -> Sweep:
    """The sweep behind the quickstart, as a user could write it in sweep.yaml."""
    engine = LocalEngine(
        model=options.model, drafter=options.drafter, allow_hybrid_unsafe=True, command=options.command
    )
    arms = [
        ArmChoice(arm=Arm.AR),
        ArmChoice(arm=Arm.DFLASH),
        ArmChoice(arm=Arm.SHADOW, budgets=SHADOW_BUDGETS),
        ArmChoice(arm=Arm.DDTREE),
        ArmChoice(arm=Arm.DDTREE, builder=Builder.SPINE_FIRST, budgets=[SIDE_BUDGET]),
        ArmChoice(arm=Arm.UNSAFE, budgets=[SIDE_BUDGET]),
    ]
    return Sweep(
        name="quickstart",
        engine=engine,
        arms=arms,
        budgets=BUDGETS,
        dataset=options.dataset or PAIR,
        prompts=options.prompts or PROMPTS,
        max_tokens=options.max_tokens or MAX_TOKENS,
    )


def show_summary(summary: Mapping[str, Any], index: Path, out: Output) -> None:
    """The summary as a table, the checks, the headline and where the report is."""
    rows = [
        [
            _name(cell),
            _interval(cell["accept_length"]),
            "-" if cell["tokens_per_second"] is None else f"{cell['tokens_per_second']:.1f}",
            _parity(cell["parity"]),
            "-" if cell["gates"]["steps_below_spine"] is None else cell["gates"]["steps_below_spine"],
            "ok" if cell["state"] == "complete" else cell["state"],
        ]
        for cell in summary["cells"]
    ]
    columns = ["arm", "tokens / pass", "tok/s", "= ar", "below", "state"]
    out.table("Tokens per target pass; same output as ar; steps below the top-1 chain", columns, rows)
    for name, value in summary["checks"].items():
        if isinstance(value, bool):
            out.line(f"  {'yes' if value else 'NO '}  {name.replace('_', ' ')}")
    out.line()
    out.line(summary["headline"])
    if summary["note"]:
        out.line(summary["note"])
    address = index.resolve().as_uri()
    out.result(summary, summary=f"report: {address} ({summary['seconds']:.0f} s)")


def require_checks(checks: Mapping[str, Any]) -> None:
    """Raise JobFailed when a yes-or-no finding is no; what could not be shown is no failure."""
    wrong = [name for name, value in checks.items() if value is False]
    if wrong:
        raise JobFailed(f"checks that failed: {', '.join(wrong)}", remedy="the report says where and why")


def _name(cell: Mapping[str, Any]) -> str:
    parts = [cell["arm"], "" if cell["budget"] is None else str(cell["budget"])]
    if cell["builder"] not in {None, Builder.BEST_FIRST.value}:
        parts.append(cell["builder"])
    if cell["arm"] == Arm.UNSAFE:
        parts.append("(wrong)")
    return " ".join(part for part in parts if part)


def _interval(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "-"
    if interval["low"] is None:
        return f"{interval['mean']:.2f}"
    return f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def _parity(parity: Mapping[str, Any]) -> str:
    if parity["identical"] is None:
        return "-"
    total = sum(parity[kind] for kind in ("identical", "near_tie", "different", "unknown"))
    ties = f" + {parity['near_tie']} near-ties" if parity["near_tie"] else ""
    unknown = f", {parity['unknown']} unknown" if parity["unknown"] else ""
    return f"{parity['identical']}{ties} of {total}{unknown}"
