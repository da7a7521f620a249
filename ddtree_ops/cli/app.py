"""The command line's root: global options, the groups, and the one place that turns errors into exit codes.

Modules of the groups import nothing heavy at their top: `ddtree --help` must stay under 300 ms.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from ddtree_ops import __version__
from ddtree_ops.cli import bench, compare, deploy, doctor, plan, quickstart, runbook, serve, verify
from ddtree_ops.cli.common import GLOBAL_FLAGS, hoist_global_flags
from ddtree_ops.errors import DdtreeError, ExitCode, from_validation
from ddtree_ops.output import Output, OutputMode

EPILOG = """
[bold]Examples[/bold]

ddtree quickstart

ddtree bench sweep sweep.yaml --dry-run

ddtree compare report results

Exit codes: 0 done, 1 the job failed, 2 the input is wrong, 3 the environment is, 130 stopped by Ctrl-C.
DDTREE_DEBUG=1 shows tracebacks. --json and --quiet may stand anywhere on the line.
"""

app = typer.Typer(
    name="ddtree",
    help="DFlash and full-tree (DDTree) speculative decoding on hybrid models: serve, measure, compare.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(serve.app, name="serve")
app.add_typer(bench.app, name="bench")
app.add_typer(compare.app, name="compare")
app.add_typer(plan.app, name="plan")
app.add_typer(deploy.app, name="deploy")
app.add_typer(runbook.app, name="runbook")
app.command(name="doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command(name="quickstart", epilog=quickstart.EPILOG)(quickstart.quickstart)
app.command(name="verify", epilog=verify.EPILOG)(verify.verify)


def main() -> None:
    """Entry point of the console script `ddtree`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Messages have been printed by then."""
    arguments = hoist_global_flags(arguments)
    out = Output(_mode(arguments))
    try:
        app(args=arguments, prog_name="ddtree", obj=out)
    except SystemExit as end:  # typer's own: help, usage errors (2), Ctrl-C (130)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == ExitCode.INTERRUPTED:
            out.error("stopped", remedy=None, exit_code=code)
        return code
    except KeyboardInterrupt:
        out.error("stopped", remedy=None, exit_code=ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED
    except Exception as error:
        return _report(error, out)
    return ExitCode.DONE


def _report(error: Exception, out: Output) -> int:
    debug = os.environ.get("DDTREE_DEBUG") == "1"
    if debug:
        traceback.print_exc()
    pydantic = sys.modules.get("pydantic")  # nobody raises its errors without importing it
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        error = from_validation(error, file=None)
    if isinstance(error, DdtreeError):
        out.error(error.message, remedy=error.remedy, exit_code=error.exit_code)
        return error.exit_code
    remedy = None if debug else "DDTREE_DEBUG=1 shows the traceback; please report it"
    message = f"internal error: {type(error).__name__}: {error}"
    out.error(message, remedy=remedy, exit_code=ExitCode.JOB_FAILED)
    return ExitCode.JOB_FAILED


def _mode(arguments: list[str]) -> OutputMode:
    flags = set(arguments[: len(GLOBAL_FLAGS)]) & GLOBAL_FLAGS.keys()
    if "--json" in flags:
        return OutputMode.JSON
    return OutputMode.QUIET if flags else OutputMode.HUMAN


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object a line, the result last.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print errors and a one-line result only.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """DFlash and full-tree (DDTree) speculative decoding on hybrid models: serve, measure, compare."""
