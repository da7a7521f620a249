"""`ddtree bench`: measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli import common
from ddtree_ops.errors import BadInput

if TYPE_CHECKING:
    from ddtree_ops.schemas.sweep import Sweep

app = typer.Typer(help="Measure arms over the same prompts.", no_args_is_help=True)

RESULTS = Path("ddtree-results")

SWEEP_EPILOG = """
[bold]Examples[/bold]

ddtree bench sweep

ddtree bench sweep sweep.yaml --dry-run

ddtree bench sweep sweep.yaml --arm ar,ddtree --budget 15,31 --results results

ddtree bench sweep --cluster cluster.yaml --concurrency 1,4 --repeats 3

ddtree bench sweep --cluster cluster.yaml --rotate      every arm on every card

ddtree bench sweep --arm ddtree --budget 31 --replicas 2      two processes of it, loaded together

The first is a laptop's sweep: ar, dflash, shadow and ddtree on the shipped pair.
Sealed cells are skipped: the same command goes on after Ctrl-C. More in docs/sweeps.md.
"""
RUN_EPILOG = """
[bold]Examples[/bold]

ddtree bench run --arm ddtree --budget 31

ddtree bench run --arm dflash --concurrency 4 --prompts 8
"""
AA_EPILOG = """
[bold]Examples[/bold]

ddtree bench aa --cluster cluster.yaml --service linear

ddtree bench aa --cluster cluster.yaml --service linear --repeats 4 --results results

Between starts all services of the cluster move on, as with `bench sweep --rotate`. The floor is kept in the
results; `ddtree compare report` shows it, and no verdict within it is given.
"""
CALIBRATE_EPILOG = """
[bold]Examples[/bold]

ddtree bench calibrate --out calibration.json

ddtree bench calibrate --url http://127.0.0.1:30003 --dataset code.jsonl
"""

COSTS_EPILOG = """
[bold]Examples[/bold]

ddtree bench costs http://127.0.0.1:30003

ddtree bench costs http://127.0.0.1:30003 --budget 15,31,63 --concurrency 1,2,4,8 --out costs.json

The server has to take a budget with every request: one of several widths, or the embedded engine. Nothing
else may use it meanwhile. The file is what budget "auto" needs (key `costs`, docs/engine-sglang.md).
"""


@app.command(epilog=SWEEP_EPILOG)
def sweep(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="sweep.yaml; default: a laptop's sweep.")] = None,
    arm: common.Arms = None,
    budget: common.Budgets = None,
    concurrency: common.Concurrencies = None,
    temperature: common.Temperatures = None,
    dataset: common.Dataset = None,
    prompts: common.Prompts = None,
    max_tokens: common.MaxTokens = None,
    repeats: common.Repeats = None,
    seed: common.Seed = None,
    model: common.Model = None,
    drafter: common.Drafter = None,
    dtype: common.Dtype = None,
    topk: common.Topk = None,
    builder: common.TreeBuilder = None,
    calibration: common.Calibration = None,
    threads: common.Threads = None,
    allow_hybrid_unsafe: common.AllowUnsafe = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Measure the services of this cluster.yaml.")
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="Restart its services in the next place between repeats."),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=1,
            help="Replicas of each service, loaded at the same time: of a cluster at most so many (all).",
        ),
    ] = None,
    side_by_side: Annotated[
        bool,
        typer.Option("--side-by-side", help="Load all services at the same time, not one after the other."),
    ] = False,
    results: common.Results = RESULTS,
    dry_run: common.DryRun = False,
    retry_failed: common.RetryFailed = False,
) -> None:
    """Measure a grid of arms, budgets, concurrencies and temperatures, arms interleaved."""
    _sweep(context, locals())


@app.command(epilog=RUN_EPILOG)
def run(
    context: typer.Context,
    arm: common.Arms = None,
    budget: common.Budgets = None,
    concurrency: common.Concurrencies = None,
    temperature: common.Temperatures = None,
    dataset: common.Dataset = None,
    prompts: common.Prompts = None,
    max_tokens: common.MaxTokens = None,
    repeats: common.Repeats = None,
    seed: common.Seed = None,
    model: common.Model = None,
    drafter: common.Drafter = None,
    dtype: common.Dtype = None,
    topk: common.Topk = None,
    builder: common.TreeBuilder = None,
    calibration: common.Calibration = None,
    threads: common.Threads = None,
    allow_hybrid_unsafe: common.AllowUnsafe = None,
    results: common.Results = RESULTS,
    dry_run: common.DryRun = False,
    retry_failed: common.RetryFailed = False,
) -> None:
    """Measure one arm (default: ddtree at budget 31) without the others to compare with."""
    _sweep(context, {**locals(), "arm": arm or ["ddtree"], "budget": budget or ["31"], "file": None})


@app.command(epilog=AA_EPILOG)
def aa(
    context: typer.Context,
    cluster: Annotated[Path, typer.Option("--cluster", help="The cluster.yaml.")],
    service: Annotated[str, typer.Option("--service", help="A service of it.")],
    concurrency: common.Concurrencies = None,
    dataset: common.Dataset = None,
    prompts: common.Prompts = None,
    max_tokens: common.MaxTokens = None,
    repeats: Annotated[int, typer.Option("--repeats", min=2, max=100, help="Starts of the service.")] = 2,
    results: common.Results = RESULTS,
    dry_run: common.DryRun = False,
    retry_failed: common.RetryFailed = False,
) -> None:
    """Measure one service as if its starts were arms: what they differ by is noise."""
    from ddtree_ops.bench.aa import aa_sweep

    options = {
        "concurrencies": common.integers("--concurrency", concurrency, "whole numbers, 1 to 256"),
        "dataset": dataset,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "repeats": repeats,
    }
    sweep = aa_sweep(cluster, service, options)
    _run(context, sweep, results, dry_run=dry_run, retry_failed=retry_failed, floors=True)


@app.command(epilog=CALIBRATE_EPILOG)
def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="The calibration file to write.")] = Path(
        "calibration.json"
    ),
    url: Annotated[
        str | None, typer.Option("--url", help="A running server; default: one of our own.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="JSONL of prompts to fit on; default: shipped ones.")
    ] = None,
    judge_dataset: Annotated[
        str | None,
        typer.Option("--judge-dataset", help="JSONL of prompts to judge on; default: a third of --dataset."),
    ] = None,
    prompts: common.Prompts = None,
    max_tokens: common.MaxTokens = None,
    model: common.Model = None,
    drafter: common.Drafter = None,
    topk: common.Topk = None,
    threads: common.Threads = None,
) -> None:
    """Fit the calibrated builder's file from logged steps; judge it on prompts that it has not seen."""
    from ddtree_ops.bench.calibrate import CalibrationJob, run_calibration
    from ddtree_ops.bench.dataset import PAIR, PAIR_CALIBRATION

    job = CalibrationJob(
        url=url,
        dataset=dataset or PAIR_CALIBRATION,
        judge_dataset=judge_dataset or (None if dataset else PAIR),
        prompts=prompts,
        max_tokens=max_tokens or 96,
        model=model,
        drafter=drafter,
        topk=topk or 16,
        threads=threads or 1,
    )
    run_calibration(job, out, common.sink(context))


@app.command(epilog=COSTS_EPILOG)
def costs(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="A running server.")],
    out: Annotated[Path, typer.Option("--out", help="The table to write.")] = Path("costs.json"),
    budget: common.Budgets = None,
    concurrency: common.Concurrencies = None,
    dataset: common.Dataset = None,
    max_tokens: common.MaxTokens = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Measurements of a point.")] = 5,
    dry_run: common.DryRun = False,
) -> None:
    """Time a step at every budget and batch size of one server; its policy picks widths by that."""
    from ddtree_ops.bench.costs import CostsJob, run_costs
    from ddtree_ops.bench.dataset import PAIR

    batches = common.integers("--concurrency", concurrency, "whole numbers, 1 to 256") or [1, 2, 4, 8]
    if wrong := [batch for batch in batches if not 1 <= batch <= 256]:
        raise BadInput.at(file=None, key="--concurrency", found=wrong[0], allowed="whole numbers, 1 to 256")
    job = CostsJob(
        url=url,
        budgets=common.integers("--budget", budget, common.ALL_BUDGETS),
        batches=batches,
        dataset=dataset or PAIR,
        tokens=max_tokens or 128,
        rounds=rounds,
    )
    run_costs(job, out, common.sink(context), dry_run=dry_run)


def _sweep(context: typer.Context, options: dict[str, Any]) -> None:
    """The common body of `sweep` and `run`."""
    from ddtree_ops.bench.config import load_sweep

    sweep = load_sweep(options["file"], _overrides(options))
    _run(context, sweep, options["results"], dry_run=options["dry_run"], retry_failed=options["retry_failed"])


def _run(
    context: typer.Context,
    sweep: Sweep,
    results: Path,
    *,
    dry_run: bool,
    retry_failed: bool,
    floors: bool = False,
) -> None:
    """Plan, and unless that is all, measure and show; `floors` also what starts differ by."""
    from ddtree_ops.bench.aa import show_floors
    from ddtree_ops.bench.report import show_outcome
    from ddtree_ops.bench.runner import require_good
    from ddtree_ops.bench.sweep import describe, execute, prepare, show_plan

    out = common.sink(context)
    with prepare(sweep, out.note) as prepared:
        if dry_run:
            show_plan(describe(prepared, results), out)
            return
        store, outcome = execute(prepared, results, out, retry_failed=retry_failed)
    if floors:
        show_floors(store, outcome, out)
    show_outcome(store, outcome, out)
    require_good(outcome)


def _overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Options as keys of a sweep; what was not given is null."""
    engine = ("model", "drafter", "dtype", "topk", "builder", "calibration", "threads", "allow_hybrid_unsafe")
    plain = ("dataset", "prompts", "max_tokens", "repeats", "seed")
    return {
        **{key: options[key] for key in plain},
        "cluster": options.get("cluster"),
        "rotate": options.get("rotate"),
        "replicas": options.get("replicas"),
        "side_by_side": options.get("side_by_side") or None,
        "arms": common.split(options["arm"]),
        "budgets": common.integers("--budget", options["budget"], common.ALL_BUDGETS),
        "concurrencies": common.integers("--concurrency", options["concurrency"], "whole numbers, 1 to 256"),
        "temperatures": common.numbers("--temperature", options["temperature"], "numbers, 0 to 2"),
        "engine": {key: options[key] for key in engine},
    }
