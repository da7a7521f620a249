"""Every runbook's play on two test hosts, with the real command: ``python tools/e2e/runbook_story.py``.

    python tools/e2e/runbook_story.py [--folder e2e/runbooks] [--cache .cache/e2e]

Each play runs in check mode, after which the hosts must be as they were; then the plays that change something
run for real, twice where a second run has nothing left to do; and once more with a host's network cut. The
hosts (see hosts.py) have no card, and their services are stand-ins that answer /ready: what the story proves
is ssh, Ansible, Docker and the plays. `summary.json` in the folder holds what is printed. Exit status 1 at
the first step that does not hold. Needs root.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hosts import PACKAGES, HostFailure, TestHosts, missing_commands
from operator_cli import Answer, CommandFailure, Operator
from rootfs import RootfsError, debootstrap_tree
from story import PROGRAM, REPOSITORY, StoryFailure, expect, say, write_summary

from ddtree_ops.runbooks.page import Page, all_pages

CLUSTER, SERVICE = "rehearsal", "tree"
IMAGE = "ddtree/rehearsal-engine:story"
STATE = "/var/lib/ddtree"
PLAY_S = 400.0
SERVE = "echo serving; exec busybox httpd -f -p 127.0.0.1:$1 -h /www"


@dataclass(frozen=True)
class Step:
    id: str
    seconds: float
    detail: str


@dataclass
class Story:
    """The steps in order. `steps` grows as they hold."""

    hosts: TestHosts
    operator: Operator
    folder: Path
    steps: list[Step] = field(default_factory=list)

    def tell(self) -> None:
        self._write_files()
        for name in self.hosts.names:
            self._serve(name)
        for page in all_pages().values():
            if page.play:
                with self._step(f"check {page.id}") as say:
                    self._check(page, say)
        with self._step("arm-restart") as say:
            self._restart(say)
        with self._step("drain and bring back") as say:
            self._drain(say)
        with self._step("disk-full") as say:
            self._disk_full(say)
        with self._step("evidence with a host cut off") as say:
            self._cut_off(say)
        with self._step("remove-all") as say:
            self._remove(say)

    # -- steps ----------------------------------------------------------------------------------------------

    def _check(self, page: Page, say: list[str]) -> None:
        """Says what it would do, on every host, and leaves them as they were."""
        before = {name: self._traces(name) for name in self.hosts.names}
        options = ["--service", SERVICE] if "service" in page.needs else []
        options += ["--limit", "gpu-a", "--limit", "gpu-b"] if "limit" in page.needs else []
        file = "cards.yaml" if page.id == "driver-upgrade" else "cluster.yaml"
        code = 1 if page.id == "remove-all" else 0  # refuses while services run
        answer = self._run(page.id, *options, "--check", file=file, code=code)
        for name, host in answer.result["hosts"].items():
            expect(host["changed"] == 0 or page.changes is not None, f"{name} changed", answer)
            if page.id == "remove-all":
                expect("services still run" in str(host["failed"]), f"{name} was not refused", answer)
        for name, traces in before.items():
            expect(self._traces(name) == traces, f"{name} is not as it was", answer)
        planned = sum(len(host["plan"]) for host in answer.result["hosts"].values())
        found = sum(len(host["found"]) for host in answer.result["hosts"].values())
        say.append(f"{found} lines found, {planned} steps planned")

    def _restart(self, say: list[str]) -> None:
        before = {name: self._started(name) for name in self.hosts.names}
        answer = self._run("arm-restart", "--service", SERVICE, "--yes")
        for name in self.hosts.names:
            after = self._started(name)
            expect(all(after[one] > before[name][one] for one in after if SERVICE in one), name, answer)
            expect(after["rehearsal-chain-0"] == before[name]["rehearsal-chain-0"], "others too", answer)
        say.append(f"{len(self.hosts.names) * 2} replicas, one after the other; the other service untouched")

    def _drain(self, say: list[str]) -> None:
        argv = ("arm-restart", "--service", SERVICE, "--limit", "gpu-a")
        self._run(*argv, "--set", "start=false", "--yes")
        again = self._run(*argv, "--set", "start=false", "--yes")
        expect(again.result["hosts"]["gpu-a"]["changed"] == 0, "a second drain changed something", again)
        expect(self._running("gpu-a") == ["rehearsal-chain-0"], str(self._running("gpu-a")), again)
        self._run(*argv, "--yes")
        expect(len(self._running("gpu-a")) == 3, str(self._running("gpu-a")), again)
        say.append("second drain: 0 changes")

    def _disk_full(self, say: list[str]) -> None:
        for name in self.hosts.names:
            script = (
                "mkdir -p /var/log/ddtree && touch -d '40 days ago' /var/log/ddtree/old.log /var/log/ddtree/x"
            )
            self.hosts.run(name, ["sh", "-c", script])
            self._import(name, None, ["LABEL ddtree.context-hash=old"])
        first = self._run("disk-full", "--yes")
        second = self._run("disk-full", "--yes")
        for name in self.hosts.names:
            plan = first.result["hosts"][name]["plan"]
            expect(len(plan) == 2, f"{name}: {plan}", first)
            expect(second.result["hosts"][name]["changed"] == 0, "a second run changed something", second)
            left = self.hosts.run(name, ["ls", "/var/log/ddtree"]).stdout.split()
            expect(left == ["x"], f"{name}: {left}", second)
        say.append("an image and a log on each host; second run: 0 changes")

    def _cut_off(self, say: list[str]) -> None:
        """The host that answers is read; the other is unreachable, not down, and nothing is done to it."""
        self.hosts.cut_network("gpu-b")
        try:
            answer = self._run("stuck-start", code=1)
        finally:
            self.hosts.restore("gpu-b")
        hosts = answer.result["hosts"]
        expect(
            hosts["gpu-b"]["unreachable"] is not None and hosts["gpu-b"]["failed"] is None, str(hosts), answer
        )
        expect(len(hosts["gpu-a"]["evidence"]) > 5, "no evidence of the host that answers", answer)
        expect(len(self._running("gpu-b")) == 3, "services of the host that was cut off", answer)
        say.append(
            f"{len(hosts['gpu-a']['evidence'])} files from gpu-a; gpu-b unreachable, its services go on"
        )

    def _remove(self, say: list[str]) -> None:
        for name in self.hosts.names:
            self.hosts.run(name, ["sh", "-c", "docker rm -f $(docker ps -aq)"])
            self.hosts.run(
                name, ["sh", "-c", f"mkdir -p {STATE}/models/m {STATE}/secrets; touch {STATE}/models/m/w"]
            )
            self.hosts.run(name, ["useradd", "--system", "ddtree"])
        first = self._run("remove-all", "--yes")
        second = self._run("remove-all", "--yes")
        for name in self.hosts.names:
            expect(second.result["hosts"][name]["changed"] == 0, "a second run changed something", second)
            expect(second.result["hosts"][name]["plan"] == [], "something is left", second)
            left = self.hosts.run(name, ["find", STATE, "/var/log/ddtree"], check=False).stdout.split()
            expect(
                left == [STATE, *(f"{STATE}/models{part}" for part in ("", "/m", "/m/w"))], str(left), first
            )
            images = self.hosts.run(name, ["docker", "images", "--quiet"]).stdout.split()
            expect(images == [], f"{name}: images {images}", first)
        say.append("weights stay, nothing else; second run: 0 changes")

    # -- the hosts ------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        def service(name: str, arm: str, port: int, **more: Any) -> dict[str, Any]:
            return {"name": name, "arm": arm, "port": port, "stop_timeout_s": 5, **more}

        cluster = {
            "schema": 1,
            "name": CLUSTER,
            "engine": "reference",
            **self.hosts.cluster_keys(),
            "monitoring": {"enabled": False},
            "services": [
                service(SERVICE, "ddtree", 30001, budget=31, replicas=2),
                service("chain", "dflash", 30011),
            ],
        }
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        # As for hosts with cards: packages of the driver are nowhere to be had here, so it is not managed.
        cards = {
            **cluster,
            "engine": "sglang",
            "model": {"repo": "lab/model"},
            "drafter": {"repo": "lab/drafter"},
        }
        cards["driver"], cards["runtime"] = {"manage": False}, {"manage": False}
        for host in cards["hosts"]["inline"].values():
            host["vars"] = {**host["vars"], "container_runtime_toolkit_packages": []}
        (self.folder / "cards.yaml").write_text(yaml.safe_dump(cards))

    def _serve(self, name: str) -> None:
        """Stand-ins for two services, labelled as `ddtree deploy` labels them."""
        self._import(name, IMAGE, ["LABEL ddtree.context-hash=now"])
        for index, (service, port) in enumerate((("tree-0", 30001), ("tree-1", 30002), ("chain-0", 30011))):
            labels = [
                f"ddtree.cluster={CLUSTER}",
                f"ddtree.service={service.partition('-')[0]}",
                f"n={index}",
            ]
            flags = [word for label in labels for word in ("--label", label)]
            argv = [
                "/bin/busybox",
                "sh",
                "-c",
                SERVE,
                "sh",
                str(port),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
            command = [
                "docker",
                "run",
                "--detach",
                "--init",
                "--network",
                "host",
                "--name",
                f"{CLUSTER}-{service}",
            ]
            self.hosts.run(name, [*command, *flags, IMAGE, *argv])

    def _import(self, name: str, tag: str | None, changes: Sequence[str]) -> None:
        """An image of busybox and one page. The archive goes through the host's own disk."""
        place = self.hosts.root(name) / "root" / "image.tar"
        place.write_bytes(archive(str(time.monotonic_ns())))
        flags = [word for change in [*changes, "ENV PATH=/bin"] for word in ("--change", change)]
        self.hosts.run(name, ["docker", "import", *flags, "/root/image.tar", *([tag] if tag else [])])
        place.unlink()

    def _started(self, name: str) -> dict[str, str]:
        names = self._running(name)
        answer = self.hosts.run(
            name, ["docker", "inspect", "--format", "{{.Name}} {{.State.StartedAt}}", *names]
        )
        pairs = (line.split() for line in answer.stdout.splitlines())
        return {one.lstrip("/"): started for one, started in pairs}

    def _running(self, name: str) -> list[str]:
        return sorted(self.hosts.run(name, ["docker", "ps", "--format", "{{.Names}}"]).stdout.split())

    def _traces(self, name: str) -> tuple[Any, ...]:
        """What a play could leave on a host or change there."""
        places = ["/etc", "/usr/local", "/var/lib/ddtree", "/var/log/ddtree", "/tmp", "/root"]
        shown = ["-printf", "%p %s %T@ %m %u\\n"]
        listing = self.hosts.run(
            name, ["find", *places, "-not", "-path", "/root/.ansible*", *shown], check=False
        )
        lines = [line for line in listing.stdout.splitlines() if line.split()[0] not in {"/tmp", "/root"}]
        images = self.hosts.run(name, ["docker", "images", "--quiet"]).stdout
        return tuple(sorted(lines)), tuple(sorted(self._started(name).items())), images

    # -- telling --------------------------------------------------------------------------------------------

    def _run(self, id: str, *options: str, file: str = "cluster.yaml", code: int = 0) -> Answer:
        place = self.folder / "evidence" / f"{len(list((self.folder / 'evidence').glob('*'))):02d}-{id}"
        argv = ("runbook", "run", id, "-f", str(self.folder / file), "--out", str(place), *options)
        return self.operator.run(*argv, timeout_s=PLAY_S).require(code)

    @contextmanager
    def _step(self, id: str) -> Iterator[list[str]]:
        said: list[str] = []
        started = time.monotonic()
        yield said
        step = Step(id, round(time.monotonic() - started, 1), "; ".join(said))
        self.steps.append(step)
        say(f"{step.id:<32}{step.seconds:7.1f} s  {step.detail}")


def archive(mark: str) -> bytes:
    """A tar with a static busybox and a page for /ready; the mark makes its image one of its own."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise StoryFailure("needs busybox-static")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(busybox, "bin/busybox")
        for name in ("bin/sh", "bin/echo"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for name, text in (("www/ready", "ok\n"), ("mark", mark)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description="Every runbook's play on two test hosts.")
    parser.add_argument("--folder", type=Path, default=Path("e2e/runbooks"), help="for logs and summary.json")
    parser.add_argument(
        "--cache", type=Path, default=REPOSITORY / ".cache" / "e2e", help="of root file systems"
    )
    arguments = parser.parse_args()
    missing = missing_commands()
    if missing:
        say(f"needs {', '.join(missing)}")
        return 1
    folder = arguments.folder.resolve()
    (folder / "evidence").mkdir(parents=True, exist_ok=True)
    operator = Operator(PROGRAM, folder)
    steps: list[Step] = []
    try:
        tree = debootstrap_tree(arguments.cache, PACKAGES, say)
        with TestHosts(folder / "hosts", tree=tree) as hosts:
            Story(hosts, operator, folder, steps).tell()
    except (StoryFailure, CommandFailure, HostFailure, RootfsError, subprocess.SubprocessError) as failure:
        say(f"failed: {failure}")
        return 1
    finally:
        operator.close()
        write_summary(folder / "summary.json", steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
