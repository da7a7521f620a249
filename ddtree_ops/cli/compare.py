"""`ddtree compare`: from sealed results to verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli import common

app = typer.Typer(help="Compare results: reports, verdicts, differences.", no_args_is_help=True)

REPORT_EPILOG = """
[bold]Examples[/bold]

ddtree compare report ddtree-results

ddtree compare report ddtree-results --out report --title "Two cards, Tuesday"
"""
DIFF_EPILOG = """
[bold]Example[/bold]

ddtree compare diff results-before results-after
"""

Run = Annotated[str | None, typer.Option("--run", help="A run's id; default: the latest.")]


@app.command(epilog=REPORT_EPILOG)
def report(
    context: typer.Context,
    results: Annotated[Path, typer.Argument(help="Folder of a results store.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the page.")] = Path("report"),
    title: Annotated[str | None, typer.Option("--title", help="The page's title.")] = None,
    run: Run = None,
) -> None:
    """Write one self-contained HTML page, with PNG and CSV files beside it."""
    from ddtree_ops.compare.report import write_report

    files = write_report(results, out, title=title, run_id=run)
    data = {
        "html": str(files.index),
        "png": [str(path) for path in files.images],
        "csv": [str(path) for path in files.tables],
        "headline": files.headline,
    }
    sink = common.sink(context)
    sink.line(files.headline)
    sink.result(data, summary=f"report: {files.index}")


@app.command(epilog=DIFF_EPILOG)
def diff(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(help="Folder of a results store: before.")],
    b: Annotated[Path, typer.Argument(help="Folder of a results store: after.")],
) -> None:
    """Compare the latest runs of two stores, cell by cell."""
    from ddtree_ops.compare.diff import diff_results, show_diff

    show_diff(diff_results(a, b), common.sink(context))
