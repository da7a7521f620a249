"""A cluster's life, told with the real commands on two test hosts: `make e2e-deploy`.

    python tools/e2e/deploy_story.py [--folder e2e] [--cache .cache/e2e]

From bare hosts (see hosts.py) to three arms in containers, a sweep over them, a killed container, a cut
network, a rollback, and nothing left. Nothing is mocked: ssh, Ansible, Docker, the image from our Dockerfile
and the CPU engine are the real ones. Every step prints its time and what it found; `summary.json` in the
folder holds the same for machines. Exit status 1 at the first step that does not hold, with the output of its
command; the hosts are taken down in any case. Needs root.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from base_image import BASE_TAG, base_image
from hosts import PACKAGES, TestHosts
from operator_cli import Answer, Command, Event, Operator
from rootfs import debootstrap_tree
from story import PROGRAM, REPOSITORY, StoryFailure, expect, import_base, say, story_main, write_summary

NAME = "rehearsal"
#: The host that loses its network has the shadow service; the container that is killed is the tree's.
LINEAR, SHADOW, TREE = ("gpu-a", "linear"), ("gpu-b", "shadow"), ("gpu-a", "tree")
SERVICES = (LINEAR, SHADOW, TREE)
CUT_SECONDS = 20.0
#: For a change of services alone: the hosts were set up minutes ago, and `up-again` shows that they stay so.
AS_THEY_ARE = "--skip-provisioning"
#: For the sweep whose container is killed: there must be load left when that happens.
LONG_ANSWERS = ("--max-tokens", "64")
#: What a command may take on a machine that has other things to do; alone it takes a small part of that.
PATIENCE_SECONDS = 900.0
#: Time that a host's own processes may need to be gone after the last command.
SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Step:
    id: str
    seconds: float
    figure: Any
    detail: str


@dataclass
class Finding:
    """What a step fills in while it runs."""

    figure: Any = None
    detail: str = ""


@dataclass(frozen=True)
class Container:
    """As the host's engine has it."""

    id: str
    name: str
    state: str
    started: str
    argv: tuple[str, ...]


@dataclass
class Story:
    """The steps in order. `steps` grows as they hold."""

    hosts: TestHosts
    operator: Operator
    folder: Path
    steps: list[Step] = field(default_factory=list)
    bare: dict[str, frozenset[str]] = field(default_factory=dict)

    def tell(self) -> None:
        self._write_files(budget=31)
        self.bare = {name: self._traces(name) for name in self.hosts.names}
        with self._step("plan") as finding:
            self._plan(finding)
        with self._step("up") as finding:
            self._up(finding)
        with self._step("up-again") as finding:
            self._up_again(finding)
        with self._step("status") as finding:
            self._status(finding)
        with self._step("sweep") as finding:
            self._sweep(finding)
        with self._step("kill-container") as finding:
            self._kill_container(finding)
        with self._step("resume") as finding:
            self._resume(finding)
        with self._step("ssh-cut") as finding:
            self._ssh_cut(finding)
        with self._step("rollback") as finding:
            self._rollback(finding)
        with self._step("down") as finding:
            self._down(finding)
        with self._step("residue") as finding:
            self._residue(finding)

    # -- steps ----------------------------------------------------------------------------------------------

    def _plan(self, finding: Finding) -> None:
        """Says all that is to be done, and does none of it."""
        answer = self._deploy("plan").require()
        finding.figure = answer.result["changes"]
        planned = sorted(str(c["container"]) for host in answer.result["hosts"] for c in host["containers"])
        wanted = sorted(_container(service) for service in SERVICES)
        expect(planned == wanted, f"planned containers: {planned}", answer)
        expect(finding.figure >= len(SERVICES), f"{finding.figure} changes", answer)
        made = self._beyond_bare()
        expect(not made, f"the plan left {made}", answer)
        for name in self.hosts.names:
            expect(not (self.hosts.root(name) / "var/lib/ddtree").exists(), f"{name} is provisioned", answer)
        finding.detail = f"{finding.figure} changes planned, none made"

    def _up(self, finding: Finding) -> None:
        answer = self._deploy("up").require()
        running = self._running()
        expect(len(running) == len(SERVICES), f"running: {sorted(running)}", answer)
        finding.figure = sorted(one.id for one in running.values())
        told = sorted(answer.result["containers"].values())
        expect(told == finding.figure, f"up says {told}, the engines have {finding.figure}", answer)
        images = {name: self._images(name) for name in self.hosts.names}
        finding.detail = ", ".join(f"{phase} {s:.0f} s" for phase, s in answer.result["seconds"].items())
        expect(
            all(any(tag.startswith(f"ddtree/{NAME}") for tag in tags) for tags in images.values()),
            f"images: {images}",
            answer,
        )

    def _up_again(self, finding: Finding) -> None:
        before = self._running()
        answer = self._deploy("up").require()
        finding.figure = answer.result["changes"]
        expect(finding.figure == 0, f"{finding.figure} changes", answer)
        expect(self._running() == before, "containers are others than before", answer)
        finding.detail = "same containers, not restarted"

    def _status(self, finding: Finding) -> None:
        answer = self._deploy("status").require()
        replicas = answer.result["replicas"]
        finding.figure = sum(one["ready"] is True for one in replicas)
        expect(finding.figure == len(SERVICES), f"ready: {replicas}", answer)
        finding.detail = ", ".join(f"{one['host']}/{one['container']} {one['state']}" for one in replicas)

    def _sweep(self, finding: Finding) -> None:
        answer = self._bench("results").finish(PATIENCE_SECONDS).require()
        states = _states(answer)
        finding.figure = sum(state == "complete" for state in states.values())
        expect(finding.figure == len(SERVICES), f"cells: {states}", answer)
        finding.detail = _speeds(answer)

    def _kill_container(self, finding: Finding) -> None:
        """The arm that died is no result, with the reason; the other arms' results stand."""
        before = self._running()
        sweep = self._bench("results-killed", *LONG_ANSWERS)
        sweep.wait_for(_all_answered, "an answer of every service", PATIENCE_SECONDS)
        host, _ = TREE
        self.hosts.run(host, ["docker", "kill", _container(TREE)])
        answer = sweep.finish(PATIENCE_SECONDS).require(1)
        cells = {cell["name"]: cell for cell in answer.result["cells"]}
        bad = {name: cell for name, cell in cells.items() if cell["state"] != "complete"}
        expect(len(cells) == len(SERVICES), f"cells: {sorted(cells)}", answer)
        expect([name.split()[0] for name in bad] == ["ddtree"], f"not complete: {sorted(bad)}", answer)
        state, reason = (str(next(iter(bad.values()))[key]) for key in ("state", "reason"))
        expect(state == "invalid", f"a cell whose service died in mid-load is {state}", answer)
        expect("killed by signal 9" in reason, f"the reason says nothing of its end: {reason}", answer)
        status = self._deploy("status").require(1)
        states = {one["container"]: one["state"] for one in status.result["replicas"]}
        wanted = {_container(LINEAR): "running", _container(SHADOW): "running", _container(TREE): "exited"}
        expect(states == wanted, f"status: {states}", status)
        left = {name: one for name, one in before.items() if name != _container(TREE)}
        expect(self._running() == left, "other containers were touched", answer)
        finding.figure = len(bad)
        finding.detail = f"{next(iter(bad))}: {reason.splitlines()[0].partition('; the end')[0]}"

    def _resume(self, finding: Finding) -> None:
        before = self._running()
        up = self._deploy("up", AS_THEY_ARE).require()
        after = self._running()
        expect(len(after) == len(SERVICES), f"running: {sorted(after)}", up)
        expect(all(after[name] == one for name, one in before.items()), "other containers were touched", up)
        again = self._bench("results-killed", *LONG_ANSWERS, "--retry-failed")
        answer = again.finish(PATIENCE_SECONDS).require()
        states = _states(answer)
        finding.figure = sum(state == "complete" for state in states.values())
        expect(finding.figure == len(SERVICES), f"cells: {states}", answer)
        reused = len(answer.result["reused"])
        expect(reused == len(SERVICES) - 1, f"{reused} cells reused", answer)
        finding.detail = f"{up.result['changes']} change by up, {reused} cells kept, 1 measured again"

    def _ssh_cut(self, finding: Finding) -> None:
        """A host that does not answer is unknown and left alone."""
        before = self._running()
        sweep = self._bench("results-cut")
        sweep.wait_for(_load_began, "its load", PATIENCE_SECONDS)
        host, _ = SHADOW
        self.hosts.cut_network(host)
        cut = time.monotonic()
        try:
            status = self._deploy("status").require(1)
            time.sleep(max(0.0, CUT_SECONDS - (time.monotonic() - cut)))
        finally:
            self.hosts.restore(host)
        seconds = time.monotonic() - cut
        states = {one["container"]: one["state"] for one in status.result["replicas"]}
        wanted = {_container(LINEAR): "running", _container(SHADOW): "unknown", _container(TREE): "running"}
        expect(states == wanted, f"status while cut: {states}", status)
        expect(list(status.result["unreachable"]) == [host], f"{status.result['unreachable']}", status)
        answer = sweep.finish(PATIENCE_SECONDS)
        lost = [name for name, state in _states(answer).items() if state != "complete"]
        expect(lost in ([], ["shadow 31"]), f"the cut spoiled {lost}", answer)
        if lost:  # requests under way when the cable went; a timed request is never sent twice
            answer = self._bench("results-cut", "--retry-failed").finish(PATIENCE_SECONDS).require()
        expect(set(_states(answer).values()) == {"complete"}, f"cells: {_states(answer)}", answer)
        self._deploy("status").require()
        after = self._running()
        torn = [name for name, one in before.items() if after.get(name) != one]
        finding.figure = len(torn)
        expect(not torn, f"restarted or gone: {torn}", answer)
        again = f" after {lost[0]} was measured again" if lost else ""
        finding.detail = f"{seconds:.0f} s, {host} unknown meanwhile, same containers; sweep complete{again}"

    def _rollback(self, finding: Finding) -> None:
        host, _ = TREE
        first = self._running()
        self._write_files(budget=15)
        changed = self._deploy("up", AS_THEY_ARE).require()
        second = self._running()
        expect(changed.result["changes"] == 1, f"{changed.result['changes']} changes for one key", changed)
        expect(_budget(second[_container(TREE)]) == "15", "the tree has its old budget", changed)
        answer = self._deploy("rollback").require()
        third = self._running()
        expect(answer.result["swapped"] == [f"{host}/{_container(TREE)}"], "others went back", answer)
        expect(_budget(third[_container(TREE)]) == "31", "the tree has still its new budget", answer)
        expect(
            third[_container(TREE)].id == first[_container(TREE)].id, "not the container from before", answer
        )
        others = {name: one for name, one in first.items() if name != _container(TREE)}
        expect(all(third[name] == one for name, one in others.items()), "others were touched", answer)
        self._write_files(budget=31)
        again = self._deploy("up", AS_THEY_ARE).require()
        expect(again.result["changes"] == 0, f"{again.result['changes']} changes after the rollback", again)
        finding.figure = len(answer.result["swapped"])
        finding.detail = "budget 31 -> 15 -> 31: the container from before serves, others untouched"

    def _down(self, finding: Finding) -> None:
        answer = self._deploy("down", "--yes").require()
        finding.figure = len(answer.result["removed"])
        left = {name: self._containers(name) for name in self.hosts.names}
        expect(not any(left.values()), f"containers: {left}", answer)
        kept = [name for name in self.hosts.names if self._images(name)]
        expect(kept == list(self.hosts.names), f"images are kept without --purge, but on {kept}", answer)
        finding.detail = f"{finding.figure} containers removed, images kept"

    def _residue(self, finding: Finding) -> None:
        """Each host is as bare as before the first command."""
        answer = self._deploy("down", "--yes", "--purge").require()
        left = self._beyond_bare()
        finding.figure = len(left)
        finding.detail = "; ".join(left) or "no container, image, volume, process or port remains"
        expect(not left, f"left: {left}", answer)

    # -- the operator's files and commands -----------------------------------------------------------------

    def _write_files(self, *, budget: int) -> None:
        common = {"max_running_requests": 1, "context_length": 1024, "extra_args": ["--threads", "1"]}
        cluster = {
            "schema": 1,
            "name": NAME,
            "engine": "reference",
            **self.hosts.cluster_keys(),
            "gpu": {"count": 0},
            "driver": {"manage": False},
            "image": {"base": BASE_TAG},
            "paths": {"min_free_gib": 1},
            "services": [
                {"name": "linear", "arm": "dflash", "port": 30001, "hosts": [LINEAR[0]], **common},
                {
                    "name": "shadow",
                    "arm": "shadow",
                    "budget": 31,
                    "port": 30011,
                    "hosts": [SHADOW[0]],
                    **common,
                },
                {
                    "name": "tree",
                    "arm": "ddtree",
                    "budget": budget,
                    "port": 30021,
                    "hosts": [TREE[0]],
                    **common,
                },
            ],
            "monitoring": {"enabled": False},
            "deadlines": {"facts": 120, "provision": 600, "build": 600, "ready": 400, "stop": 120},
        }
        cluster["ssh"] |= {"connect_timeout_s": 5}
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))
        sweep = {
            "schema": 1,
            "name": NAME,
            "arms": ["dflash", "shadow", "ddtree"],
            "budgets": [31],
            "prompts": 4,
            "max_tokens": 16,
        }
        (self.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))

    def _deploy(self, verb: str, *options: str, timeout_s: float = PATIENCE_SECONDS) -> Answer:
        return self.operator.run("deploy", verb, "--cluster", "cluster.yaml", *options, timeout_s=timeout_s)

    def _bench(self, results: str, *options: str) -> Command:
        cluster = ("--cluster", "cluster.yaml")
        return self.operator.start("bench", "sweep", "sweep.yaml", *cluster, "--results", results, *options)

    @contextmanager
    def _step(self, name: str) -> Iterator[Finding]:
        started = time.monotonic()
        finding = Finding()
        say(f"{name} ...")
        try:
            yield finding
        except BaseException as error:
            seconds = time.monotonic() - started
            self.steps.append(Step(name, round(seconds, 1), finding.figure, f"failed: {_first_line(error)}"))
            raise
        seconds = time.monotonic() - started
        self.steps.append(Step(name, round(seconds, 1), finding.figure, finding.detail))
        say(f"{name:15} {seconds:6.1f} s  {_short(finding.figure)}  {finding.detail}")

    # -- what the hosts have -------------------------------------------------------------------------------

    def _containers(self, host: str) -> list[Container]:
        ids = self.hosts.run(host, ["docker", "ps", "--all", "--quiet", "--no-trunc"]).stdout.split()
        if not ids:
            return []
        found = json.loads(self.hosts.run(host, ["docker", "inspect", *ids]).stdout)
        return [
            Container(
                one["Id"],
                one["Name"].removeprefix("/"),
                one["State"]["Status"],
                one["State"]["StartedAt"],
                (*(one["Config"]["Entrypoint"] or ()), *(one["Config"]["Cmd"] or ())),
            )
            for one in found
        ]

    def _running(self) -> dict[str, Container]:
        """Of both hosts, by name: no two services of a cluster share one."""
        found = [one for host in self.hosts.names for one in self._containers(host)]
        return {one.name: one for one in found if one.state == "running"}

    def _images(self, host: str) -> list[str]:
        """Tags, but for the base's."""
        argv = ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]
        return sorted(set(self.hosts.run(host, argv).stdout.split()) - {BASE_TAG})

    def _beyond_bare(self) -> list[str]:
        """What the hosts have now and had not at first; connections that are closing get time for it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = [
                f"{name}: {what}"
                for name in self.hosts.names
                for what in sorted(self._traces(name) - self.bare[name])
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def _traces(self, host: str) -> frozenset[str]:
        """All that a deploy could leave on a host, apart from the folders that provisioning makes."""
        lists = {
            "container": ["docker", "ps", "--all", "--format", "{{.Names}}"],
            "image": ["docker", "images", "--all", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}"],
            "volume": ["docker", "volume", "ls", "--quiet"],
            "network": ["docker", "network", "ls", "--format", "{{.Name}}"],
            "file": ["find", "/tmp", "/var/tmp", "/root/.ansible", "-mindepth", "1", "-not", "-type", "d"],
        }
        found = {
            f"{what} {line}"
            for what, argv in lists.items()
            for line in self.hosts.run(host, argv, check=what != "file").stdout.splitlines()
        }
        found |= {f"port {line}" for line in self.hosts.listening(host)}
        return frozenset(found | {f"process {args}" for _, args in self.hosts.processes(host)})


def main() -> int:
    return story_main(run, __doc__, folder=REPOSITORY / "e2e", holds="of summary.json and logs")


def run(folder: Path, cache: Path) -> int:
    """The whole of it, and the summary in any case. Raises what a step raises."""
    started = time.monotonic()
    summary = folder / "summary.json"
    folder = folder / "deploy"
    _empty(folder)
    summary.unlink(missing_ok=True)
    tree = _timed("hosts' Debian", lambda: debootstrap_tree(cache, PACKAGES))
    base = _timed("base image's Debian", lambda: base_image(cache))
    operator = Operator(PROGRAM, folder)
    with TestHosts(folder / "hosts", tree=tree) as hosts:
        story = Story(hosts, operator, folder)
        try:
            _timed("base image", lambda: import_base(hosts, base))
            story.tell()
        finally:
            operator.close()
            write_summary(summary, story.steps)
    say(f"all {len(story.steps)} steps hold, {time.monotonic() - started:.0f} s")
    return 0


def _empty(folder: Path) -> None:
    """What an earlier story left, but for `hosts`: TestHosts sweeps that itself."""
    folder.mkdir(parents=True, exist_ok=True)
    strange = (
        {p.name for p in folder.iterdir()} - {"hosts"} if not (folder / "cluster.yaml").exists() else set()
    )
    if strange:
        raise StoryFailure(f"{folder}: holds other things than a story: {', '.join(sorted(strange))}")
    for path in folder.iterdir():
        if path.name == "hosts":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _timed(what: str, work: Callable[[], Any]) -> Any:
    started = time.monotonic()
    found = work()
    say(f"{what:15} {time.monotonic() - started:6.1f} s")
    return found


def _container(service: tuple[str, str]) -> str:
    return f"{NAME}-{service[1]}-0"


def _budget(container: Container) -> str:
    return container.argv[container.argv.index("--budget") + 1]


def _load_began(events: Sequence[Event]) -> bool:
    return any(event["event"] == "progress" and event["done"] >= 1 for event in events)


def _all_answered(events: Sequence[Event]) -> bool:
    """The first round is through: whatever dies now leaves numbers behind."""
    return any(event["event"] == "progress" and event["done"] >= len(SERVICES) for event in events)


def _states(answer: Answer) -> Mapping[str, str]:
    return {cell["name"]: cell["state"] for cell in answer.result["cells"]}


def _speeds(answer: Answer) -> str:
    cells = answer.result["cells"]
    return ", ".join(f"{c['name']} {c['accept_length']:.2f} tokens a pass" for c in cells)


def _short(figure: Any) -> str:
    return " ".join(one[:12] for one in figure) if isinstance(figure, list) else str(figure)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    raise SystemExit(main())
