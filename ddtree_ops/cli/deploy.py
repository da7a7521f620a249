"""`ddtree deploy`: a cluster's configuration, and whether its hosts are fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli import verify
from ddtree_ops.cli.common import sink, split
from ddtree_ops.cli.findings import show_findings
from ddtree_ops.errors import BadInput

if TYPE_CHECKING:
    from ddtree_ops.cli.deploy_run import Choice
    from ddtree_ops.hosts.facts import FactsProvider
    from ddtree_ops.hosts.runner import Event
    from ddtree_ops.output import Output
    from ddtree_ops.schemas.cluster import Cluster

EPILOG_INIT = """
[bold]Examples[/bold]

ddtree deploy init                                write cluster.yaml with every key explained

ddtree deploy init --inventory ~/ansible/hosts    take the hosts of your Ansible inventory
"""
EPILOG_CHECK = """
[bold]Examples[/bold]

ddtree deploy check                       every host of cluster.yaml

ddtree deploy check --limit gpu-a --save captures/    one host; keep what was read

ddtree deploy check --facts captures/gpu-a.json       a host captured earlier

Exit codes: 0 nothing failed (there may be warnings), 1 a check failed or no answer, 2 bad input.
"""

EPILOG = """
[bold]Examples[/bold]

ddtree deploy init                  write cluster.yaml

ddtree deploy                       plan, ask, bring it up

ddtree deploy -f lab.yaml --yes     the same without asking

Exit codes: 0 done, 1 something failed or does not answer, 2 bad input, 3 the environment. See docs/deploy.md.
"""
EPILOG_PLAN = """
[bold]Examples[/bold]

ddtree deploy plan                          everything that `up` would change

ddtree deploy plan --service tree           one service, and the provisioning of its hosts

ddtree deploy plan --skip-provisioning      images and containers only

Changes nothing. Exit code 1 when `up` would stop on a host; hosts that do not answer are listed as unknown.
"""
EPILOG_UP = """
[bold]Examples[/bold]

ddtree deploy up                            provision hosts, build the image, start and check all services

ddtree deploy up --service tree             only this service; the others are not touched

ddtree deploy up --tags container_runtime   only this part of the playbooks, then image and services

ddtree deploy up --service tree --skip-provisioning --recreate      a fresh container, for a rotated key

ddtree deploy up --rotate 1                 every service on the next GPUs: arms take turns on cards

What is equal stays as it is: a second run makes 0 changes. A container that does not get ready gives way to
the previous one, and its log is kept. Exit code 1 when something failed or a host does not answer.
"""
EPILOG_STATUS = """
[bold]Examples[/bold]

ddtree deploy status

ddtree deploy status --limit gpu-a --json

Exit code 1 when something is not as cluster.yaml says, or when it is not known.
"""
EPILOG_LOGS = """
[bold]Examples[/bold]

ddtree deploy logs tree                          the last 100 lines of each replica

ddtree deploy logs tree --limit gpu-a --follow   one replica, until Ctrl-C

ddtree deploy logs tree --previous --tail 0      all that the replaced container said
"""
EPILOG_DOWN = """
[bold]Examples[/bold]

ddtree deploy down                 stop and remove all containers of the cluster; logs are kept here

ddtree deploy down --service tree --yes

ddtree deploy down --purge --yes   its images and caches, too

Afterwards it looks whether ports are closed and cards idle: exit code 1 when something is left or not known.
"""
EPILOG_ROLLBACK = """
[bold]Examples[/bold]

ddtree deploy rollback --service tree    back to the container that was replaced

ddtree deploy rollback                   every service that has one

ddtree deploy rollback --service front   a gateway, which only goes back by name

Rolling back twice returns. `ddtree deploy up` brings back what cluster.yaml says.
"""

ClusterFile = Annotated[Path, typer.Option("--cluster", "-f", help="The cluster's file.")]
Limit = Annotated[list[str] | None, typer.Option("--limit", help="Only this host; repeat for more.")]
Services = Annotated[list[str] | None, typer.Option("--service", help="Only this service; repeat for more.")]
Tags = Annotated[list[str] | None, typer.Option("--tags", help="Only these parts of the playbooks.")]
SkipProvisioning = Annotated[
    bool, typer.Option("--skip-provisioning", help="Take the hosts as they are: no playbook runs.")
]
Recreate = Annotated[bool, typer.Option("--recreate", help="Replace containers that are equal, too.")]
KeepFailed = Annotated[
    bool, typer.Option("--keep-failed", help="Leave a container that failed; the previous one stays aside.")
]
IgnoreChecks = Annotated[bool, typer.Option("--ignore-checks", help="Go on where `deploy check` fails.")]
Rotate = Annotated[
    int | None,
    typer.Option(
        "--rotate", min=0, help="Move services on by so many GPUs, or groups of GPUs; stays until changed."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
CLUSTER = Path("cluster.yaml")

app = typer.Typer(
    help="Bring a cluster up from bare hosts, check it, take it down.",
    epilog=EPILOG,
    invoke_without_command=True,
)


@app.callback()
def _group(
    context: typer.Context,
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    service: Services = None,
    yes: Yes = False,
) -> None:
    """Bring a cluster up from bare hosts, check it, take it down. Without a command: plan, ask, up."""
    from ddtree_ops.cli import deploy_run

    if context.invoked_subcommand is not None:
        if limit or service or yes or cluster != CLUSTER:
            name = context.invoked_subcommand
            raise BadInput(f"options belong behind the command: ddtree deploy {name} --cluster FILE ...")
    else:
        choice = deploy_run.Choice(cluster, tuple(limit or ()), tuple(service or ()))
        raise typer.Exit(deploy_run.plan_and_up(sink(context), choice, yes=yes))


@app.command(epilog=EPILOG_PLAN)
def plan(
    context: typer.Context,
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    service: Services = None,
    tags: Tags = None,
    skip_provisioning: SkipProvisioning = False,
    recreate: Recreate = False,
    rotate: Rotate = None,
) -> None:
    """Show, host by host and service by service, what `up` would change. Changes nothing."""
    from ddtree_ops.cli import deploy_run

    choice = _choice(cluster, limit, service, tags, not skip_provisioning, recreate)
    raise typer.Exit(deploy_run.plan(sink(context), replace(choice, turn=rotate)))


@app.command(epilog=EPILOG_UP)
def up(
    context: typer.Context,
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    service: Services = None,
    tags: Tags = None,
    skip_provisioning: SkipProvisioning = False,
    recreate: Recreate = False,
    keep_failed: KeepFailed = False,
    ignore_checks: IgnoreChecks = False,
    rotate: Rotate = None,
) -> None:
    """Provision hosts, build and ship the image, start what differs, and check that every service serves."""
    from ddtree_ops.cli import deploy_run

    choice = _choice(cluster, limit, service, tags, not skip_provisioning, recreate)
    choice = replace(choice, restore=not keep_failed, checks=not ignore_checks, turn=rotate)
    raise typer.Exit(deploy_run.up(sink(context), choice))


@app.command(epilog=EPILOG_STATUS)
def status(
    context: typer.Context, cluster: ClusterFile = CLUSTER, limit: Limit = None, service: Services = None
) -> None:
    """Show every replica: state and reason, image, GPU memory, and what differs from cluster.yaml."""
    from ddtree_ops.cli import deploy_run

    raise typer.Exit(deploy_run.status(sink(context), _choice(cluster, limit, service)))


@app.command(epilog=EPILOG_LOGS)
def logs(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="The service.")],
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Only this replica of a host.")] = None,
    tail: Annotated[int, typer.Option(min=0, help="So many lines from the end; 0 for all.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the container ends.")] = False,
    previous: Annotated[bool, typer.Option("--previous", help="Of the container that was replaced.")] = False,
) -> None:
    """Print what a service's containers say. Without what looks like a secret."""
    from ddtree_ops.cli import deploy_run

    choice = _choice(cluster, limit, [service])
    out, lines = sink(context), tail or None
    code = deploy_run.logs(out, choice, replica=replica, tail=lines, follow=follow, previous=previous)
    raise typer.Exit(code)


@app.command(epilog=EPILOG_DOWN)
def down(
    context: typer.Context,
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    service: Services = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove images and volumes, too.")] = False,
    yes: Yes = False,
) -> None:
    """Stop and remove the cluster's containers, keep their logs, and look that nothing is left."""
    from ddtree_ops.cli import deploy_run

    choice = _choice(cluster, limit, service)
    raise typer.Exit(deploy_run.down(sink(context), choice, purge=purge, yes=yes))


@app.command(epilog=EPILOG_ROLLBACK)
def rollback(
    context: typer.Context, cluster: ClusterFile = CLUSTER, limit: Limit = None, service: Services = None
) -> None:
    """Swap services and gateways back to the containers that were replaced."""
    from ddtree_ops.cli import deploy_run

    raise typer.Exit(deploy_run.rollback(sink(context), _choice(cluster, limit, service)))


@app.command(epilog=EPILOG_INIT)
def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Where to write.")] = Path("cluster.yaml"),
    inventory: Annotated[Path | None, typer.Option(help="An Ansible inventory to take the hosts of.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented cluster.yaml."""
    from ddtree_ops.schemas.publish import FOLDER

    if file.exists() and not force:
        raise BadInput(f"{file} exists already", remedy="choose another name, or --force")
    if not file.parent.is_dir():
        raise BadInput(f"{file.parent}: no such folder")
    text = (FOLDER / "cluster.template.yaml").read_text(encoding="utf-8")
    if inventory is not None:
        text = _with_inventory(text, inventory)
    file.write_text(text, encoding="utf-8")
    sink(context).result({"file": str(file)}, summary=f"wrote {file}; next: ddtree doctor --cluster {file}")


@app.command(epilog=EPILOG_CHECK)
def check(
    context: typer.Context,
    cluster: ClusterFile = CLUSTER,
    limit: Limit = None,
    facts: Annotated[list[Path] | None, typer.Option(help="Captured hosts instead of real ones.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep what was read in this folder.")] = None,
) -> None:
    """Read every host's driver, cards, kernel, docker and disks, and say what is not fit. Changes nothing."""
    from ddtree_ops.config_file import load_config
    from ddtree_ops.hosts.checks import check_host, expectations, unreachable_host
    from ddtree_ops.hosts.facts import CapturedHosts, parse_facts
    from ddtree_ops.schemas.cluster import Cluster

    out = sink(context)
    wanted = load_config(cluster, Cluster)
    provider = CapturedHosts(facts) if facts else _ansible_facts(out, wanted, cluster.parent, limit or [])
    captures = provider.captures()
    if save is not None:
        _save(save, captures)
    findings = [
        finding
        for name, capture in captures.items()
        for finding in check_host(parse_facts(capture, name=name), expectations(wanted, name))
    ]
    findings += [unreachable_host(name, reason) for name, reason in provider.unreachable().items()]
    raise typer.Exit(show_findings(out, wanted.name, findings))


app.command("verify", epilog=verify.EPILOG_DEPLOY)(verify.deploy_verify)


def _choice(
    cluster: Path,
    limit: list[str] | None,
    services: list[str] | None,
    tags: list[str] | None = None,
    provisioning: bool = True,
    recreate: bool = False,
) -> Choice:
    from ddtree_ops.cli.deploy_run import Choice

    hosts, names, parts = (tuple(split(values) or ()) for values in (limit, services, tags))
    return Choice(cluster, hosts, names, parts, provisioning=provisioning, recreate=recreate)


def _ansible_facts(out: Output, cluster: Cluster, folder: Path, limit: list[str]) -> FactsProvider:
    from ddtree_ops.hosts.ansible_facts import AnsibleHosts

    def show(event: Event) -> None:
        out.event("task", host=event.host, task=event.task, status=event.status)

    hosts = AnsibleHosts.of(cluster, folder, limit=limit, on_event=show)
    out.note(f"reading {', '.join(hosts.names)}")
    return hosts


def _with_inventory(text: str, inventory: Path) -> str:
    """The template with the user's inventory, whose hosts are read once to see that they can be."""
    from ddtree_ops.hosts.inventory import read_inventory

    read_inventory(inventory)
    quoted = json.dumps(str(inventory.resolve()))
    return re.sub(r"^  inventory: .*$", lambda _: f"  inventory: {quoted}", text, count=1, flags=re.MULTILINE)


def _save(folder: Path, captures: object) -> None:
    assert isinstance(captures, dict)
    folder.mkdir(parents=True, exist_ok=True)
    for name, capture in captures.items():
        (folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json").write_text(
            json.dumps(capture, indent=1), encoding="utf-8"
        )
