"""`ddtree deploy`: a cluster's configuration, and whether its hosts are fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import sink
from ddtree_ops.cli.findings import show_findings
from ddtree_ops.errors import BadInput

if TYPE_CHECKING:
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

ClusterFile = Annotated[Path, typer.Option("--cluster", "-f", help="The cluster's file.")]

app = typer.Typer(help="Bring a cluster up from bare hosts, check it, take it down.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Bring a cluster up from bare hosts, check it, take it down."""


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
    cluster: ClusterFile = Path("cluster.yaml"),
    limit: Annotated[list[str] | None, typer.Option(help="Only this host; repeat for more.")] = None,
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
