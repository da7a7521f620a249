"""The bodies of `ddtree deploy plan | up | status | logs | down | rollback`, and how their answers look."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ddtree_ops.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from ddtree_ops.deploy.down import DownReport
    from ddtree_ops.deploy.plan import ClusterPlan
    from ddtree_ops.deploy.rollback import RollbackReport
    from ddtree_ops.deploy.session import ClusterSession
    from ddtree_ops.deploy.status import ClusterStatus, ReplicaStatus
    from ddtree_ops.deploy.up import Report
    from ddtree_ops.gateway.deploy import GatewayStatus
    from ddtree_ops.hosts.runner import Event
    from ddtree_ops.output import Output

DIFF_LINES = 12


@dataclass(frozen=True)
class Choice:
    """What all commands take: the file, and which hosts, services and parts of the playbooks."""

    file: Path
    limit: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    provisioning: bool = True
    recreate: bool = False
    restore: bool = True
    checks: bool = True
    turn: int | None = None


def plan(out: Output, choice: Choice) -> int:
    """Show what would change. 1 when `up` would stop on a host."""
    from ddtree_ops.deploy.session import LOOK_S, open_cluster

    with open_cluster(choice.file, limit=choice.limit, patience_s=LOOK_S) as session:
        found = _plan(out, session, choice)
        show_plan(out, found)
        summary = _plan_summary(found)
        out.result({"ok": not found.blocked, **found.as_json()}, summary=summary)
    return ExitCode.JOB_FAILED if found.blocked else ExitCode.DONE


def plan_and_up(out: Output, choice: Choice, *, yes: bool) -> int:
    """Plan, confirm, up."""
    from ddtree_ops.deploy.lockfile import exclusively
    from ddtree_ops.deploy.session import LOOK_S, open_cluster
    from ddtree_ops.output import OutputMode

    if not yes and (out.mode is not OutputMode.HUMAN or not sys.stdin.isatty()):
        raise BadInput("ddtree deploy asks before it changes anything", remedy="--yes, or `ddtree deploy up`")
    limit = choice.limit
    with exclusively(choice.file), open_cluster(choice.file, limit=limit, patience_s=LOOK_S) as session:
        found = _plan(out, session, choice)
        show_plan(out, found)
        if found.refused:
            out.result({"ok": False, "done": False, **found.as_json()}, summary=_plan_summary(found))
            return ExitCode.JOB_FAILED
        out.line(_plan_summary(found))
        if found.unknown:
            limit_s = session.cluster.deadlines.connect
            out.line(f"they are waited for, {limit_s:g} s at most, and brought up like the others")
        if not yes and not typer.confirm("Do it?"):
            out.result({"ok": True, "done": False}, summary="nothing was changed")
            return ExitCode.DONE
        return _up(out, session, choice)


def up(out: Output, choice: Choice) -> int:
    """Bring it up. 1 when a container or a host failed or did not answer."""
    from ddtree_ops.deploy.lockfile import exclusively
    from ddtree_ops.deploy.session import open_cluster

    limit = choice.limit
    with exclusively(choice.file), open_cluster(choice.file, limit=limit, connect=False) as session:
        return _up(out, session, choice)


def status(out: Output, choice: Choice) -> int:
    """Show what runs. 1 when anything is not as configured or not known."""
    from ddtree_ops.deploy.session import LOOK_S, open_cluster
    from ddtree_ops.deploy.status import look

    with open_cluster(choice.file, limit=choice.limit, patience_s=LOOK_S) as session:
        found = look(session, services=choice.services)
    show_status(out, found)
    every: list[ReplicaStatus | GatewayStatus] = [*found.replicas, *found.gateways]
    bad = [one for one in every if not one.good]
    lines = f"{len(bad)} of {len(every)} are not as configured" if bad else "all as configured"
    lines += f"; not in cluster.yaml: {', '.join(found.strays)}" if found.strays else ""
    out.result(found.as_json(), summary=lines)
    return ExitCode.DONE if found.good else ExitCode.JOB_FAILED


def down(out: Output, choice: Choice, *, purge: bool, yes: bool) -> int:
    """Take it down and look that nothing is left."""
    from ddtree_ops.deploy.down import take_down
    from ddtree_ops.deploy.lockfile import exclusively
    from ddtree_ops.deploy.session import open_cluster
    from ddtree_ops.output import OutputMode

    if not yes:
        if out.mode is not OutputMode.HUMAN or not sys.stdin.isatty():
            raise BadInput("ddtree deploy down asks before it removes anything", remedy="add --yes")
        if not typer.confirm(f"Stop and remove the services of {choice.file}?"):
            out.result({"ok": True, "done": False}, summary="nothing was changed")
            return ExitCode.DONE
    with exclusively(choice.file), open_cluster(choice.file, limit=choice.limit) as session:
        report = take_down(session, out, services=choice.services, purge=purge)
    show_down(out, report)
    return ExitCode.DONE if report.good else ExitCode.JOB_FAILED


def rollback(out: Output, choice: Choice) -> int:
    """Swap in the previous containers."""
    from ddtree_ops.deploy.lockfile import exclusively
    from ddtree_ops.deploy.rollback import roll_back
    from ddtree_ops.deploy.session import open_cluster

    with exclusively(choice.file), open_cluster(choice.file, limit=choice.limit) as session:
        report = roll_back(session, out, services=choice.services)
    show_rollback(out, report)
    return ExitCode.DONE if report.good else ExitCode.JOB_FAILED


def logs(
    out: Output, choice: Choice, *, replica: int | None, tail: int | None, follow: bool, previous: bool
) -> int:
    """Print logs of a service's containers."""
    from ddtree_ops.deploy.logs import log_places, log_stream
    from ddtree_ops.deploy.session import open_cluster

    with open_cluster(choice.file, limit=choice.limit) as session:
        places = log_places(session, choice.services[0], replica=replica, previous=previous)
        if follow and len(places) > 1:
            names = ", ".join(f"{host}/{name}" for host, name in places)
            raise BadInput.at(
                file=None, key="--follow", found=names, allowed="one container: --limit and --replica"
            )
        lines = 0
        for host, name in places:
            if len(places) > 1:
                out.line(f"== {host}/{name}")
            for line in log_stream(session, host, name, tail=tail, follow=follow):
                lines += 1
                out.line(line)
                out.event("log", host=host, container=name, line=line)
        out.result({"ok": True, "containers": [f"{h}/{n}" for h, n in places], "lines": lines}, summary="")
    return ExitCode.DONE


def show_plan(out: Output, found: ClusterPlan) -> None:
    """By host: what Ansible would change, the image, the containers; then memory, and what is not known."""
    for host in found.hosts:
        for change in host.changes:
            out.line(f"{host.host}: {change.task}")
            lines = change.diff.splitlines()
            for line in lines[:DIFF_LINES]:
                out.line(f"    {line}")
            if len(lines) > DIFF_LINES:
                out.line(f"    ... {len(lines) - DIFF_LINES} lines more (--json shows all)")
        if host.error:
            out.line(f"{host.host}: the check of provisioning stopped: {host.error}")
        if host.refused:
            out.line(f"{host.host}: refused: {host.refused}")
        for finding in host.findings:
            out.line(f"{host.host}: {finding.status.value} {finding.id}: {finding.found}")
            out.line(f"    try: {finding.remedy}")
        if host.bare:
            out.line(f"{host.host}: no Docker yet: provisioning brings it")
        out.line(f"{host.host}: image: {host.image}")
    rows = [
        (step.name, step.host, step.action.value, step.reason, ", ".join(_short(g) for g in _gpus(step.spec)))
        for host in found.hosts
        for step in host.steps
    ]
    if rows:
        out.table("Containers", ("container", "host", "action", "why", "GPUs"), rows)
    for host in found.hosts:
        for step in host.steps:
            for line in step.diff:
                out.line(f"  {step.host}/{step.name}: {line}")
            if step.spec is not None and step.action.value == "create":
                out.line(f"  {step.host}/{step.name}: {' '.join(step.spec.argv)}")
    for fit in found.fits:
        verdict = fit.verdict.value if fit.verdict else "unknown"
        out.line(f"memory: {fit.service}: {verdict}: {fit.reason}")
    for name, why in found.unknown.items():
        out.line(f"{name}: unknown: {why}")


def show_status(out: Output, found: ClusterStatus) -> None:
    rows = [
        (
            one.container,
            one.host,
            one.state + (f" ({one.health})" if one.health else ""),
            {None: "-", True: "yes", False: "no"}[one.ready],
            "-" if one.uptime_s is None else str(timedelta(seconds=round(one.uptime_s))),
            "-" if one.memory is None else f"{one.memory[0]}/{one.memory[1]} MiB",
            one.image or "-",
            one.url or "-",
        )
        for one in found.replicas
    ]
    out.table(
        "Services", ("container", "host", "state", "ready", "up for", "GPU memory", "image", "here"), rows
    )
    if found.gateways:
        doors = [
            (
                one.container,
                one.host,
                one.state,
                one.service,
                "-" if one.serving is None else one.serving.summary,
                one.url or "-",
            )
            for one in found.gateways
        ]
        out.table("Gateways", ("container", "host", "state", "service", "replicas", "here"), doors)
    every: list[ReplicaStatus | GatewayStatus] = [*found.replicas, *found.gateways]
    for each in every:
        if each.reason:
            out.line(f"{each.host}/{each.container}: {each.reason}")
        for line in each.drift:
            out.line(f"    {line}")


def show_down(out: Output, report: DownReport) -> None:
    for host, left in report.left.items():
        for line in left:
            out.warning(f"{host}: {line}")
    for host, why in report.unreachable.items():
        out.warning(f"{host}: unreachable, left as it is: {why}")
    text = f"{len(report.removed)} containers removed"
    text += f", {len(report.images)} images, {len(report.volumes)} volumes" if report.images else ""
    text += "; nothing is left" if report.good else "; something is left or not known"
    out.result(report.as_json(), summary=text)


def show_rollback(out: Output, report: RollbackReport) -> None:
    for name, why in report.failed.items():
        out.warning(f"{name}: {why}")
    for host, why in report.unreachable.items():
        out.warning(f"{host}: unreachable, left as it is: {why}")
    for name in report.without:
        out.line(f"{name}: has no previous container and stays")
    text = f"{len(report.swapped)} went back"
    if report.swapped:
        text += "; they differ from cluster.yaml now, which `ddtree deploy up` would restore"
    out.result(report.as_json(), summary=text)


def _plan(out: Output, session: ClusterSession, choice: Choice) -> ClusterPlan:
    from ddtree_ops.deploy.plan import make_plan

    def show(event: Event) -> None:
        out.event("task", host=event.host, task=event.task, status=event.status)

    session.turn_to(choice.turn)
    out.note(f"looking at {', '.join(session.hosts) or 'no host: none answers'}")
    return make_plan(
        session,
        services=choice.services,
        tags=choice.tags,
        provisioning=choice.provisioning,
        recreate=choice.recreate,
        on_event=show,
    )


def _plan_summary(found: ClusterPlan) -> str:
    text = f"{found.changes} changes on {len(found.hosts)} hosts"
    if found.unknown:
        text += f"; unknown, since they do not answer: {', '.join(found.unknown)}"
    if found.refused:
        return f"{text}; `up` would refuse and change nothing, see above"
    return text + ("; `up` would stop on a host, see above" if found.blocked else "")


def _up(out: Output, session: ClusterSession, choice: Choice) -> int:
    from ddtree_ops.deploy.up import Options, bring_up

    options = Options(
        services=choice.services,
        tags=choice.tags,
        provisioning=choice.provisioning,
        recreate=choice.recreate,
        restore=choice.restore,
        checks=choice.checks,
    )
    session.turn_to(choice.turn)
    report = bring_up(session, options, out)
    show_up(out, report)
    return ExitCode.DONE if report.good else ExitCode.JOB_FAILED


def show_up(out: Output, report: Report) -> None:
    rows = [(step.name, step.host, step.action.value, step.reason) for step in report.steps]
    if rows:
        out.table("Containers", ("container", "host", "action", "why"), rows)
    for name, why in report.failed.items():
        out.warning(f"{name}: {why}")
    for host, why in report.unreachable.items():
        out.warning(f"{host}: unreachable, left as it is: {why}")
    for file in report.logs:
        out.line(f"kept: {file}")
    text = f"{report.changes} changes; " + ("all services are ready" if report.good else "not all is well")
    out.result(report.as_json(), summary=text)


def _gpus(spec: object) -> Sequence[str]:
    return getattr(spec, "gpus", ())


def _short(uuid: str) -> str:
    return uuid[:12]
