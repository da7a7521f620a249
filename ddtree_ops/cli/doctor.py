"""`ddtree doctor`: is this machine fit to deploy and to measure from?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli.common import integers, sink
from ddtree_ops.cli.findings import show_findings
from ddtree_ops.errors import BadInput

EPILOG = """
[bold]Examples[/bold]

ddtree doctor                          this machine alone

ddtree doctor --cluster cluster.yaml   also its configuration, secrets and access to the models

Exit codes: 0 nothing failed (warnings may be there), 1 a check failed, 2 the input is wrong.
"""


def doctor(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Option(help="Also check this cluster.yaml.")] = None,
    port: Annotated[
        list[str] | None, typer.Option(help="A port that should be free here; repeat or use commas.")
    ] = None,
) -> None:
    """Check this machine: Python, Ansible, ssh, docker, disk, ports; and a cluster.yaml with its secrets."""
    from ddtree_ops.hosts.operator import QUICKSTART_PORTS, check_operator

    ports = integers("--port", port, "ports from 1 to 65535")
    for number in ports or ():
        if not 1 <= number <= 65535:
            raise BadInput.at(file=None, key="--port", found=number, allowed="ports from 1 to 65535")
    findings = check_operator(cluster_file=cluster, ports=tuple(ports or QUICKSTART_PORTS))
    raise typer.Exit(show_findings(sink(context), "this machine", findings))
