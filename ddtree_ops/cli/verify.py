"""`ddtree verify`: is what runs there right? One bundle that says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli import common
from ddtree_ops.errors import BadInput, ExitCode
from ddtree_ops.schemas.arms import Arm

if TYPE_CHECKING:
    from ddtree_ops.deploy.session import ClusterSession
    from ddtree_ops.hosts.facts import HostFacts
    from ddtree_ops.output import Output
    from ddtree_ops.schemas.acceptance import AcceptanceSummary
    from ddtree_ops.verify.job import VerifyOptions
    from ddtree_ops.verify.subjects import Address

EPILOG = """
[bold]Examples[/bold]

ddtree verify --engine local                          the CPU engine's arms, started and stopped here

ddtree verify --service ddtree=http://127.0.0.1:30003 --service dflash=http://127.0.0.1:30001

Exit codes: 0 nothing failed, 1 something did (the bundle is written and says what), 2 bad input, 3 bad
environment. A server's API key is taken from DDTREE_API_KEY. More in docs/acceptance.md.
"""

EPILOG_DEPLOY = """
[bold]Examples[/bold]

ddtree deploy verify                              every replica, the kernel table, a short sweep

ddtree deploy verify --limit gpu-a --skip sweep   one host, gates and kernel table

The kernel table needs a card that no service uses. Exit codes: 0 nothing failed, 1 something did (the bundle
is written and says what), 2 bad input, 3 something does not run. More in docs/acceptance.md.
"""

ClusterFile = Annotated[Path, typer.Option("--cluster", "-f", help="The cluster's file.")]
Out = Annotated[Path, typer.Option("--out", help="The bundle to write; must not exist.")]
Skip = Annotated[
    list[str] | None, typer.Option("--skip", help="kernels, sweep; repeat or use commas. Gates always run.")
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="How many prompts, from the start.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens decoded for each prompt.")]

BUNDLE = Path("ddtree-acceptance.tar.gz")


def verify(
    context: typer.Context,
    service: Annotated[
        list[str] | None, typer.Option("--service", "-s", help="ARM=URL of a running server; repeat it.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="local: start the CPU engine's arms here.")
    ] = None,
    arm: common.Arms = None,
    budget: Annotated[int, typer.Option("--budget", "-b", help="Of the local ddtree arm.")] = 31,
    out: Out = BUNDLE,
    skip: Skip = None,
    dataset: common.Dataset = None,
    prompts: Prompts = 8,
    max_tokens: MaxTokens = 64,
    model: common.Model = None,
    drafter: common.Drafter = None,
    dtype: common.Dtype = None,
    threads: common.Threads = None,
    allow_hybrid_unsafe: common.AllowUnsafe = None,
) -> None:
    """Judge running services by gates that need no oracle, measure briefly, and pack one redacted bundle."""
    from ddtree_ops.verify.job import VerifyOptions, check_options, run_verify
    from ddtree_ops.verify.kernels import LocalKernels

    sink = common.sink(context)
    options = VerifyOptions(
        out, frozenset(common.split(skip) or ()), prompts, max_tokens, dataset or VerifyOptions.dataset
    )
    if (engine is None) == (not service):
        raise BadInput("--service, --engine: found both or neither, allowed: exactly one of them")
    if engine is None:
        summary = run_verify(addresses(service or []), options, sink, kernels=LocalKernels())
        raise typer.Exit(show(summary, options, sink))
    if engine != "local":
        raise BadInput.at(file=None, key="--engine", found=engine, allowed="local")
    from ddtree_ops.schemas.arms import BUDGETS
    from ddtree_ops.schemas.sweep import LocalEngine
    from ddtree_ops.services.foreground import require_engine
    from ddtree_ops.verify.local import DEFAULT_ARMS, local_arms

    given = {"model": model, "drafter": drafter, "dtype": dtype, "threads": threads}
    local = LocalEngine.model_validate(
        {key: value for key, value in given.items() if value is not None}
        | {"allow_hybrid_unsafe": bool(allow_hybrid_unsafe)}
    )
    require_engine()
    if budget not in BUDGETS:
        raise BadInput.at(file=None, key="--budget", found=budget, allowed=common.ALL_BUDGETS)
    read = check_options(options)
    arms = [_arm(name) for name in common.split(arm) or DEFAULT_ARMS]
    with local_arms(arms, local, budget, read, options.work / "logs", sink) as started:
        summary = run_verify(started, options, sink, kernels=LocalKernels())
    raise typer.Exit(show(summary, options, sink))


def deploy_verify(
    context: typer.Context,
    cluster: ClusterFile = Path("cluster.yaml"),
    limit: Annotated[list[str] | None, typer.Option("--limit", help="Only this host; repeat.")] = None,
    out: Out = BUNDLE,
    skip: Skip = None,
    dataset: common.Dataset = None,
    prompts: Prompts = 8,
    max_tokens: MaxTokens = 64,
) -> None:
    """Judge what was deployed by gates that need no oracle, measure briefly, and pack one redacted bundle."""
    from ddtree_ops.deploy.session import open_cluster
    from ddtree_ops.verify.cluster import ClusterKernels, addresses_of, deployed, place_of
    from ddtree_ops.verify.job import VerifyOptions, check_options, run_verify

    sink = common.sink(context)
    options = VerifyOptions(
        out, frozenset(common.split(skip) or ()), prompts, max_tokens, dataset or VerifyOptions.dataset
    )
    check_options(options)
    with open_cluster(cluster, limit=common.split(limit) or []) as session:
        replicas, facts = deployed(session), _facts(session, sink)
        summary = run_verify(
            addresses_of(session, replicas),
            options,
            sink,
            place=place_of(session, facts),
            kernels=ClusterKernels(session, facts, replicas),
        )
    raise typer.Exit(show(summary, options, sink))


def _facts(session: ClusterSession, out: Output) -> dict[str, HostFacts]:
    """Of the hosts; a bundle without them is worth having, too."""
    from ddtree_ops.errors import DdtreeError

    try:
        return session.facts()
    except DdtreeError as error:
        out.warning(f"the hosts' facts could not be read: {error.message}")
        return {}


def addresses(services: list[str]) -> list[Address]:
    """`ARM=URL` options. Raises BadInput."""
    from ddtree_ops.verify.subjects import Address

    key = os.environ.get("DDTREE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = []
    for text in services:
        name, mark, url = text.partition("=")
        if not mark or not url.startswith(("http://", "https://")):
            raise BadInput.at(file=None, key="--service", found=text, allowed="ARM=http://HOST:PORT")
        found.append(Address(_arm(name), url.rstrip("/"), headers=headers))
    return found


def show(summary: AcceptanceSummary, options: VerifyOptions, out: Output) -> int:
    """The verdict and where the bundle is; the exit code."""
    from ddtree_ops.schemas.acceptance import StageStatus, Verdict
    from ddtree_ops.verify.job import result_data

    for name, stage in (("kernels", summary.kernels), ("sweep", summary.sweep)):
        if stage.status is not StageStatus.DONE:
            out.line(f"  {name}: {stage.status.value}: {stage.reason}")
    if summary.sweep.headline:
        out.line(f"  {summary.sweep.headline}")
    out.result(
        result_data(summary, options.out),
        summary=f"{summary.verdict.value}: {options.out} ({summary.seconds:.0f} s)",
    )
    return ExitCode.JOB_FAILED if summary.verdict is Verdict.FAILED else ExitCode.DONE


def _arm(name: str) -> Arm:
    try:
        return Arm(name)
    except ValueError:
        raise BadInput.at(file=None, key="--service, --arm", found=name, allowed=common.ARMS) from None
