"""`ddtree runbook`: what to do when something is wrong, for people, and with a play where one helps."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import sink
from ddtree_ops.errors import BadInput

if TYPE_CHECKING:
    from ddtree_ops.hosts.runner import Event
    from ddtree_ops.output import Output
    from ddtree_ops.runbooks.page import Page
    from ddtree_ops.runbooks.play import Played, RunbookPlay

EPILOG_LIST = """
[bold]Examples[/bold]

ddtree runbook list              every page, what somebody gets up for first

ddtree runbook list GpuXid       pages that an alert, a check or a metric points to, or that speak of a word
"""
EPILOG_SHOW = """
[bold]Examples[/bold]

ddtree runbook show gpu-xid

ddtree runbook show gpu-xid --raw > gpu-xid.md
"""
EPILOG_RUN = """
[bold]Examples[/bold]

ddtree runbook run disk-full --check                          what it would do; changes nothing

ddtree runbook run arm-restart --service tree --limit gpu-a   one service on one host

ddtree runbook run arm-restart --service tree --set start=false --yes

A play that changes something first shows what it would do, and asks (not with --yes). A redacted log and what
was collected stay in a folder. Exit codes: 0 done, 1 a host failed or was unreachable, 2 bad input.
"""

app = typer.Typer(
    help="What to do when something is wrong: pages, and plays behind them.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID", help="A page's id; see `ddtree runbook list`.")]


@app.command(name="list", epilog=EPILOG_LIST)
def list_pages(
    context: typer.Context,
    about: Annotated[
        str | None, typer.Argument(help="A check's id, an alert's or a metric's name, or any word.")
    ] = None,
) -> None:
    """List the pages, or those about something."""
    from ddtree_ops.runbooks.page import all_pages, pages_about

    out = sink(context)
    pages = list(all_pages().values()) if about is None else pages_about(about)
    if not pages:
        raise BadInput(f"no page is about {about!r}", remedy="ddtree runbook list")
    rows = [(page.id, page.severity.value, "yes" if page.play else "", page.title) for page in pages]
    out.table("runbooks", ("id", "severity", "play", "title"), rows)
    summary = f"{len(pages)} pages; next: ddtree runbook show {pages[0].id}"
    out.result({"pages": [page.model_dump(mode="json", exclude={"text"}) for page in pages]}, summary=summary)


@app.command(epilog=EPILOG_SHOW)
def show(
    context: typer.Context,
    id: Id,
    raw: Annotated[bool, typer.Option("--raw", help="The page's Markdown as it is.")] = False,
) -> None:
    """Show a page: symptom, check, action, rollback, how to know that it worked."""
    from ddtree_ops.output import OutputMode
    from ddtree_ops.runbooks.page import find_page

    out, page = sink(context), find_page(id)
    if out.mode is OutputMode.HUMAN and not raw:
        out.markdown(_header(page) + page.text)
        return
    out.result(page.model_dump(mode="json"), summary=f"# {page.title}\n\n{page.text.rstrip()}")


@app.command(epilog=EPILOG_RUN)
def run(
    context: typer.Context,
    id: Id,
    cluster: Annotated[Path, typer.Option("--cluster", "-f", help="The cluster's file.")] = Path(
        "cluster.yaml"
    ),
    limit: Annotated[list[str] | None, typer.Option(help="Only this host; repeat for more.")] = None,
    service: Annotated[str | None, typer.Option(help="Only this service of the cluster.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the page; repeat for more."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Show what would be done; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Where evidence and logs go; default: below ddtree-logs/, beside the file."
        ),
    ] = None,
) -> None:
    """Run a page's play: first what it would do, then, when you agree, for real."""
    from ddtree_ops.config_file import load_config
    from ddtree_ops.deploy.session import log_folder
    from ddtree_ops.runbooks.page import find_page
    from ddtree_ops.runbooks.play import RunbookPlay, require_play
    from ddtree_ops.schemas.cluster import Cluster

    out, page = sink(context), find_page(id)
    require_play(page)
    asks = page.changes is not None and not check and not yes
    wanted = load_config(cluster, Cluster)
    play = RunbookPlay(
        page,
        wanted,
        cluster.parent,
        limit=limit or [],
        service=service,
        settings=_pairs(set_ or []),
    )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{page.id}"
    place = folder or log_folder(cluster, wanted) / "runbooks" / name
    played = _played(out, play, cluster, place, check=check or asks)
    if asks and played.planned and not played.failed:
        _require_somebody(out, page)
        if not typer.confirm(f"{page.id}: do it?", err=True):
            out.result({"runbook": page.id, "applied": False}, summary="nothing was changed")
            return
        played = _played(out, play, cluster, place, check=False)
    _finish(out, page, played, applied=page.changes is not None and not played.check)


def _header(page: Page) -> str:
    """What stands above a page on a terminal."""
    rows = [("severity", page.severity.value), ("changes", page.changes or "nothing")]
    rows += [(what, ", ".join(f"`{one}`" for one in names)) for what, names in page.pointers.items() if names]
    if page.play:
        options = "".join(f" --{need.value} {need.value.upper()}" for need in page.needs)
        rows.append(("play", f"`ddtree runbook run {page.id}{options}`"))
        rows += [
            (f"--set {name}", f"{one.means} (default: {str(one.default).lower()})")
            for name, one in page.settings.items()
        ]
    lines = "\n".join(f"- **{name}**: {value}" for name, value in rows)
    return f"# {page.title}\n\n{lines}\n\n"


def _require_somebody(out: Output, page: Page) -> None:
    from ddtree_ops.output import OutputMode

    if out.mode is not OutputMode.HUMAN or not sys.stdin.isatty():
        raise BadInput(
            f"{page.id} {page.changes}; there is nobody here to ask, so nothing was changed",
            remedy="--yes to do it",
        )


def _pairs(texts: list[str]) -> dict[str, str]:
    """NAME=VALUE as a mapping. Raises BadInput."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput.at(file=None, key="--set", found=text, allowed="NAME=VALUE")
        found[name] = value
    return found


def _played(out: Output, play: RunbookPlay, file: Path, place: Path, *, check: bool) -> Played:
    """Run the play while showing what it does, then what it found. What changes something runs alone."""
    from ddtree_ops.deploy.lockfile import exclusively

    def show(event: Event) -> None:
        out.event("task", host=event.host, task=event.task, status=event.status)
        if event.status in {"changed", "failed", "unreachable"}:
            out.note(f"  {event.host}: {event.task}: {event.status}")

    doing = "looking at" if check or play.page.changes is None else "working on"
    out.note(f"{play.page.id}: {doing} {', '.join(play.inventory.names)}")
    with nullcontext() if check or play.page.changes is None else exclusively(file):
        played = play.run(place, check=check, on_event=show)
    for host in play.inventory.names:
        for line in played.found.get(host, ()):
            out.line(f"{host}: {line}")
        for line in played.plan.get(host, ()) if check else ():
            out.line(f"{host}: would {line}")
    for finding in played.findings:
        out.line(f"{finding.host}: {finding.status.value} {finding.id}: {finding.found}")
    return played


def _finish(out: Output, page: Page, played: Played, *, applied: bool) -> None:
    """The result, and the exit code when a host failed."""
    outcome = played.outcome
    what = "nothing changed"
    if applied:
        what = f"{played.planned} steps{'' if not played.failed else ', not all of them done'}"
    elif page.changes is not None:
        what = f"{played.planned} steps planned, nothing changed"
    out.result(
        {
            "runbook": page.id,
            "ok": not played.failed,
            "applied": applied,
            "hosts": {
                name: {
                    "found": played.found.get(name, []),
                    "plan": played.plan.get(name, []),
                    "changed": host.changed,
                    "failed": host.message if host.failed else None,
                    "unreachable": host.message if host.unreachable else None,
                    "evidence": [str(file) for file in played.evidence.get(name, ())],
                }
                for name, host in outcome.hosts.items()
            },
            "findings": [one.as_json() for one in played.findings],
            "folder": str(played.folder),
            "log": str(outcome.log) if outcome.log else None,
        },
        summary=f"{page.id}: {what}; evidence and log: {played.folder}",
    )
    outcome.require_ok()
