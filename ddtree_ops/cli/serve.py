"""`ddtree serve`: run one service in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli import common
from ddtree_ops.schemas.arms import Arm

app = typer.Typer(help="Run a service in the foreground.", no_args_is_help=True)

LOCAL_EPILOG = """
[bold]Examples[/bold]

ddtree serve local --arm ddtree --budget 31 --port 30003

ddtree serve local --arm dflash --model target/ --drafter drafter/ --dtype bfloat16
"""


@app.command(epilog=LOCAL_EPILOG)
def local(
    context: typer.Context,
    arm: Annotated[Arm, typer.Option("--arm", "-a", help="What to decode with.")] = Arm.DDTREE,
    budget: Annotated[
        int | None, typer.Option("--budget", "-b", help=f"Tree nodes without the root: {common.ALL_BUDGETS}.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 30000,
    model: common.Model = None,
    drafter: common.Drafter = None,
    topk: common.Topk = None,
    builder: common.TreeBuilder = None,
    calibration: common.Calibration = None,
    dtype: common.Dtype = None,
    threads: common.Threads = None,
    allow_hybrid_unsafe: common.AllowUnsafe = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the engine's command line only.")] = False,
) -> None:
    """Serve one arm with the CPU engine on this machine, SGLang's routes and fields included."""
    from ddtree_ops.services.foreground import serve_local

    serve_local(
        common.sink(context),
        arm=arm,
        budget=budget,
        host=host,
        port=port,
        model=model,
        drafter=drafter,
        topk=topk,
        builder=builder,
        calibration=calibration,
        dtype=dtype,
        threads=threads,
        allow_hybrid_unsafe=bool(allow_hybrid_unsafe),
        dry_run=dry_run,
    )
