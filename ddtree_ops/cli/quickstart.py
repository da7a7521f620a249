"""`ddtree quickstart`: the whole job on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli import common

EPILOG = """
[bold]Examples[/bold]

ddtree quickstart

ddtree quickstart --prompts 4 --max-tokens 48 --out /tmp/quick

It leaves OUT/report/index.html, OUT/summary.json and the results store OUT/results.
"""


def quickstart(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="Folder for results and report.")] = Path("quickstart"),
    dataset: common.Dataset = None,
    prompts: common.Prompts = None,
    max_tokens: common.MaxTokens = None,
    model: common.Model = None,
    drafter: common.Drafter = None,
    dry_run: common.DryRun = False,
) -> None:
    """Serve every arm on this machine, sweep tree budgets, judge the outputs, write the report. About 3
    minutes.
    """
    from ddtree_ops.bench.quickstart import QuickstartOptions, run_quickstart

    options = QuickstartOptions(out, dataset, prompts, max_tokens, model, drafter)
    run_quickstart(options, common.sink(context), dry_run=dry_run)
