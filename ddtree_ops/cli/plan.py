"""`ddtree plan`: what a service would need, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ddtree_ops.cli.common import sink
from ddtree_ops.errors import BadInput, ExitCode
from ddtree_ops.schemas.arms import BUDGETS, Arm

if TYPE_CHECKING:
    from ddtree_ops.memory.planner import Plan, Wanted
    from ddtree_ops.memory.shapes import DrafterShape, TargetShape
    from ddtree_ops.output import Output

EPILOG = """
[bold]Examples[/bold]

ddtree plan memory                                   Qwen3.6-27B on one 96 GB card: budgets x running requests

ddtree plan memory --budget 63 --running 8           one service, part by part

ddtree plan memory --cluster cluster.yaml            every service of a cluster.yaml

Exit code 1 when something does not fit.
"""

T = TypeVar("T")

app = typer.Typer(help="See what a service would need, before anything is started.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """See what a service would need, before anything is started."""


@app.command(epilog=EPILOG)
def memory(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Target: folder, config.json or known repository (Qwen/Qwen3.6-27B).")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter, given likewise.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Plan the services of this cluster.yaml instead.")
    ] = None,
    arm: Annotated[Arm, typer.Option(help="The arm.")] = Arm.DDTREE,
    budget: Annotated[
        int | None, typer.Option(help="Nodes without the root; default: show all budgets.")
    ] = None,
    running: Annotated[int, typer.Option(min=1, max=256, help="Requests that may run at once.")] = 8,
    context_length: Annotated[int, typer.Option(min=256, help="Tokens of the longest request.")] = 32768,
    card_gib: Annotated[float, typer.Option(min=1, help="Memory of one card.")] = 95.6,
    tp: Annotated[int, typer.Option(min=1, max=8, help="GPUs that one replica spans.")] = 1,
    mem_fraction: Annotated[
        float, typer.Option(min=0.1, max=0.99, help="Share of the card for pools.")
    ] = 0.80,
    weights: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32 or fp8; default: the model's.")
    ] = None,
    ssm_dtype: Annotated[str, typer.Option(help="Recurrent states: float32 or bfloat16.")] = "float32",
    scratch: Annotated[str, typer.Option(help="Per tree node: stash or snapshots.")] = "stash",
) -> None:
    """Weights, KV, recurrent states and per-node scratch; what fits on a card, and which knob to turn."""
    from ddtree_ops.memory.planner import GIB, Wanted
    from ddtree_ops.schemas.cluster import Scratch

    out = sink(context)
    if cluster is not None:
        raise typer.Exit(_plan_cluster(out, cluster, model, drafter))
    target, draft = _shapes(model, drafter, needs_drafter=arm is not Arm.AR)
    wanted = Wanted(
        arm=arm,
        budget=budget,
        running=running,
        context=context_length,
        card=int(card_gib * GIB),
        tp=_one_of("--tp", tp, (1, 2, 4, 8)),
        mem_fraction=mem_fraction,
        weights=_one_of("--weights", weights or target.dtype, ("bfloat16", "float16", "float32", "fp8")),
        ssm=_one_of("--ssm-dtype", ssm_dtype, ("float32", "bfloat16")),
        scratch=Scratch(_one_of("--scratch", scratch, tuple(Scratch))),
    )
    if budget is None and arm.takes_budget:
        raise typer.Exit(_show_grid(out, target, draft, wanted))
    raise typer.Exit(_show_plans(out, target, draft, {arm.value: wanted}))


def _plan_cluster(out: Output, file: Path, model: str | None, drafter: str | None) -> int:
    from ddtree_ops.config_file import load_config
    from ddtree_ops.memory.planner import cluster_services
    from ddtree_ops.schemas.cluster import Cluster

    found = load_config(file, Cluster)
    model = model or _known(found.model, "--model")
    drafter = drafter or (_known(found.drafter, "--drafter") if found.drafter else None)
    target, draft = _shapes(model, drafter, needs_drafter=drafter is not None)
    return _show_plans(out, target, draft, cluster_services(found, weights=target.dtype))


def _known(checkpoint: Any, option: str) -> str:
    """The name of a checkpoint whose shape may be known here; a folder on a host cannot be read from here."""
    if checkpoint is None or checkpoint.repo is None:
        raise BadInput(f"{option}: found none, allowed: a folder or config.json on this machine")
    return str(checkpoint.repo)


def _shapes(
    model: str | None, drafter: str | None, *, needs_drafter: bool
) -> tuple[TargetShape, DrafterShape | None]:
    from ddtree_ops.memory.shapes import KNOWN_DRAFTERS, KNOWN_TARGETS, drafter_shape, target_shape

    if model is not None and model not in KNOWN_TARGETS and drafter is None and needs_drafter:
        raise BadInput("--drafter: found none, allowed: the drafter of --model")
    target = target_shape(model or next(iter(KNOWN_TARGETS)))
    if not needs_drafter:
        return target, None
    return target, drafter_shape(drafter or next(iter(KNOWN_DRAFTERS)))


def _show_plans(
    out: Output, target: TargetShape, drafter: DrafterShape | None, services: dict[str, Wanted]
) -> int:
    from ddtree_ops.memory.planner import Verdict, knobs, plan_memory

    plans = {name: plan_memory(target, drafter, wanted) for name, wanted in services.items()}
    bad = [name for name, plan in plans.items() if plan.verdict is Verdict.NO]
    remedies = {name: knobs(target, drafter, services[name]) for name in bad}
    for name, plan in plans.items():
        _show_parts(out, name, plan)
        if name in remedies:
            out.line(f"  to make it fit: {'; or '.join(remedies[name]) or 'nothing single does'}")
    result = {
        "model": target.name,
        "drafter": drafter.name if drafter else None,
        "services": {
            name: {**_as_json(plan), "knobs": remedies.get(name, [])} for name, plan in plans.items()
        },
    }
    summary = f"does not fit: {', '.join(bad)}" if bad else f"fits: {', '.join(plans)}"
    out.result(result, summary=summary)
    return ExitCode.JOB_FAILED if bad else ExitCode.DONE


def _show_parts(out: Output, name: str, plan: Plan) -> None:
    from ddtree_ops.memory.planner import GIB

    rows = [
        (part.name, f"{'~' if part.estimate else ''}{part.size / GIB:.2f}", where, part.how)
        for where, parts in (("pools", plan.static), ("outside", plan.reserve))
        for part in parts
    ]
    kv = plan.kv_tokens * plan.token_bytes
    rows.insert(
        len(plan.static), ("KV", f"{kv / GIB:.2f}", "pools", f"{plan.kv_tokens} x {plan.token_bytes} B")
    )
    wanted = plan.wanted
    budget = "" if wanted.budget is None else f", budget {wanted.budget}"
    title = f"{name}: {wanted.arm.value}{budget}, {wanted.running} running, tp {wanted.tp}"
    out.table(title, ("part", "GiB", "where", "how"), rows)
    out.line(f"  {plan.verdict.value}: {plan.reason}; --max-mamba-cache-size {plan.state_slots}")


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "arm": plan.wanted.arm.value,
        "budget": plan.wanted.budget,
        "running": plan.wanted.running,
        "verdict": plan.verdict.value,
        "reason": plan.reason,
        "parts": {part.name: part.size for part in (*plan.static, *plan.reserve)},
        "kv_tokens": plan.kv_tokens,
        "kv_token_bytes": plan.token_bytes,
        "state_slots": plan.state_slots,
    }


def _show_grid(out: Output, target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> int:
    """Budgets down, running requests across: thousands of KV tokens that are left, or why not."""
    from ddtree_ops.memory.planner import GIB, Verdict, largest_budget, plan_memory

    columns = sorted({count for count in (1, 2, 4, 8, 16, 32) if count < wanted.running} | {wanted.running})
    grid = {
        budget: {
            count: plan_memory(target, drafter, replace(wanted, budget=budget, running=count))
            for count in columns
        }
        for budget in BUDGETS
    }
    marks = {Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.NO: "no"}
    rows = [
        (
            str(budget),
            *(f"{marks[plan.verdict]} {plan.kv_tokens // 1000}k" for plan in plans.values()),
        )
        for budget, plans in grid.items()
    ]
    card, arm, scratch = f"{wanted.card / GIB:.1f} GiB", wanted.arm.value, wanted.scratch.value
    title = f"{target.name} on {card}: {arm}, {scratch}, tp {wanted.tp}"
    out.table(title, ("budget", *(f"{count} running" for count in columns)), rows)
    out.line(
        f"  fits: {wanted.context} tokens for every request; tight: for one; k: thousands of KV tokens left"
    )
    best = largest_budget(target, drafter, wanted)
    result = {
        "model": target.name,
        "largest_budget": best,
        "running": wanted.running,
        "grid": {str(b): {str(c): _as_json(plan) for c, plan in plans.items()} for b, plans in grid.items()},
    }
    summary = f"largest budget with {wanted.running} running: {'none' if best is None else best}"
    out.result(result, summary=summary)
    return ExitCode.JOB_FAILED if best is None else ExitCode.DONE


def _one_of(option: str, found: T, allowed: tuple[T, ...]) -> T:
    if found not in allowed:
        raise BadInput.at(file=None, key=option, found=found, allowed=", ".join(map(str, allowed)))
    return found
