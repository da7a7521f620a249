"""Runs a page's play on the hosts of a cluster.yaml: first to see what it would do, then for real.

What a play finds and plans comes back as facts of its hosts (`runbook_found` and `runbook_plan`, lists of
lines), and evidence as a bundle for each host, which is unpacked beside the redacted log.
"""

from __future__ import annotations

import difflib
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.layout import services_on
from ddtree_ops.deploy.provision import host_variables, variables
from ddtree_ops.errors import BadInput, JobFailed
from ddtree_ops.gateway.render import home_of
from ddtree_ops.hosts.ansible_facts import ansible_for
from ddtree_ops.hosts.checks import Finding, Status, check_host, expectations
from ddtree_ops.hosts.facts import parse_facts
from ddtree_ops.hosts.inventory import Host, Inventory, load_inventory
from ddtree_ops.hosts.runner import Event, Outcome, RunStatus
from ddtree_ops.runbooks.page import Need, Page
from ddtree_ops.schemas.cluster import Cluster

CAPTURE = "facts_capture"


@dataclass
class Played:
    """What a play found and did (or would do) on each host.

    folder    of evidence and log
    findings  of `ddtree deploy check`, where the play has read the host again
    """

    outcome: Outcome
    folder: Path
    check: bool
    found: dict[str, list[str]] = field(default_factory=dict)
    plan: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    evidence: dict[str, list[Path]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a host failed, was unreachable, or the play did not end as it should."""
        return self.outcome.status is not RunStatus.OK

    @property
    def planned(self) -> int:
        """How many steps are planned over all hosts."""
        return sum(map(len, self.plan.values()))


class RunbookPlay:
    """A page's play with everything that it needs, checked before a host is touched.

    folder    that of cluster.yaml
    limit     names of hosts; none means every host that the service runs on
    settings  texts of `--set`, by name
    Raises BadInput for a page without a play, a missing or wrong option, and a wrong host.
    """

    def __init__(
        self,
        page: Page,
        cluster: Cluster,
        folder: Path,
        *,
        limit: Sequence[str] = (),
        service: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        require_play(page)
        _require_needs(page, limit, service)
        self.page = page
        self._cluster = cluster
        self._folder = folder
        self._service = _require_service(cluster, service)
        self._settings = _parse_settings(page, settings or {})
        self.inventory = self._hosts(list(limit))

    def run(
        self, out: Path, *, check: bool = False, on_event: Callable[[Event], None] | None = None
    ) -> Played:
        """Run it; evidence and a redacted log are left in `out`. With `check` nothing changes.

        Failures of hosts are in the outcome: evidence of the others is there all the same.
        """
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        ansible = ansible_for(self._cluster, self._folder, self.inventory, log_folder=out)
        outcome = ansible.run(
            self.page.playbook,
            variables=self.play_variables(out),
            check=check,
            deadline_s=self.page.deadline_s * len(self.inventory.hosts),
            on_event=on_event,
        )
        played = Played(outcome, out, check)
        for name, facts in outcome.facts.items():
            played.found[name] = [str(line) for line in facts.get("runbook_found", ())]
            played.plan[name] = [str(line) for line in facts.get("runbook_plan", ())]
            if CAPTURE in facts:
                played.findings += self._judged(name, facts[CAPTURE])
        for name in self.inventory.names:
            bundle = out / f"{name}.tar.gz"
            if bundle.is_file():
                played.evidence[name] = unpack(bundle, out / name)
        return played

    def play_variables(self, out: Path) -> dict[str, Any]:
        """Extra variables: those of the roles from cluster.yaml, and the runbooks' own."""
        cluster = self._cluster
        stop = {one.name: one.stop_timeout_s for one in cluster.services}
        stop |= {one.name: one.stop_timeout_s for one in cluster.gateways}
        return {
            **variables(cluster, self._folder),
            "runbook_cluster": cluster.name,
            "runbook_service": self._service or "",
            "runbook_folder": str(out.resolve()),
            "runbook_state": cluster.paths.state,
            "runbook_models": cluster.paths.models,
            "runbook_socket": cluster.runtime.socket,
            "runbook_logs": cluster.paths.logs,
            "runbook_stop_seconds": stop.get(self._service or "", max(stop.values())),
            "runbook_ready_seconds": int(cluster.deadlines.ready),
            **self._settings,
        }

    def _hosts(self, limit: list[str]) -> Inventory:
        """The hosts that are meant, with their own variables."""
        everything = load_inventory(self._cluster, self._folder)
        chosen = everything.limited(limit)
        if self._service is not None:
            where = [host for host in everything.names if self._serves(host, everything)]
            serving = [host for host in chosen.names if host in where]
            if not serving:
                raise BadInput.at(file=None, key="--limit", found=", ".join(limit), allowed=", ".join(where))
            chosen = chosen.limited(serving)
        hosts = (
            Host(host.name, {**host.variables, **host_variables(self._cluster, host, everything)})
            for host in chosen.hosts
        )
        return Inventory(tuple(hosts))

    def _serves(self, host: str, whole: Inventory) -> bool:
        cluster, name = self._cluster, self._service
        if any(one.name == name for one in services_on(cluster, host)):
            return True
        return any(one.name == name and home_of(cluster, one, whole) == host for one in cluster.gateways)

    def _judged(self, host: str, capture: Mapping[str, Any]) -> list[Finding]:
        """What a host that was read again does not pass."""
        findings = check_host(parse_facts(capture, name=host), expectations(self._cluster, host))
        return [one for one in findings if one.status in {Status.FAIL, Status.WARN}]


def unpack(bundle: Path, folder: Path) -> list[Path]:
    """Move the bundle's files into the folder. Raises JobFailed for a broken bundle."""
    folder.mkdir(exist_ok=True, mode=0o700)
    try:
        with tarfile.open(bundle) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise JobFailed(f"{bundle}: the evidence cannot be unpacked ({error})") from error
    bundle.unlink()
    return sorted(file for file in folder.rglob("*") if file.is_file())


def require_play(page: Page) -> None:
    """Raise BadInput for a page that is for reading only."""
    if page.play:
        return
    raise BadInput(
        f"{page.id} has no play: its steps are commands that you choose between",
        remedy=f"ddtree runbook show {page.id}",
    )


def _require_needs(page: Page, limit: Sequence[str], service: str | None) -> None:
    given = {Need.LIMIT: limit, Need.SERVICE: service}
    names = {Need.LIMIT: "the name of a host", Need.SERVICE: "the name of a service"}
    for need in page.needs:
        if not given[need]:
            raise BadInput(f"{page.id}: --{need.value}: found nothing, allowed: {names[need]}")


def _require_service(cluster: Cluster, service: str | None) -> str | None:
    names = [*(one.name for one in cluster.services), *(one.name for one in cluster.gateways)]
    if service is None or service in names:
        return service
    close = difflib.get_close_matches(service, names, n=1)
    remedy = f"--service {close[0]}" if close else None
    raise BadInput.at(file=None, key="--service", found=service, allowed=", ".join(names), remedy=remedy)


def _parse_settings(page: Page, given: Mapping[str, str]) -> dict[str, bool | int]:
    """Values for the play, by variable; the type of the default decides."""
    found: dict[str, bool | int] = {f"runbook_{name}": one.default for name, one in page.settings.items()}
    for name, text in given.items():
        if name not in page.settings:
            allowed = ", ".join(page.settings) or f"nothing: {page.id} has no settings"
            raise BadInput.at(file=None, key="--set", found=name, allowed=allowed)
        found[f"runbook_{name}"] = _parse(name, text, page.settings[name].default)
    return found


def _parse(name: str, text: str, default: bool | int) -> bool | int:
    if isinstance(default, bool):
        if text not in {"true", "false"}:
            raise BadInput.at(file=None, key=f"--set {name}", found=text, allowed="true, false")
        return text == "true"
    if not text.isdecimal():
        raise BadInput.at(file=None, key=f"--set {name}", found=text, allowed="a whole number")
    return int(text)
