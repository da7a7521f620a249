"""A gateway over two test hosts, told with the real commands: `python tools/e2e/gateway_story.py`.

    python tools/e2e/gateway_story.py [--folder .cache/e2e-gateway] [--cache .cache/e2e]

Two replicas of the tree's arm, one on each host, behind the gateway smg on the first: built, started and
checked by `ddtree deploy`; a replica killed under load loses the streams that it had begun and no other
request, comes back with the next `up`, and `down` leaves nothing. Needs root.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from base_image import BASE_TAG, base_image
from deploy_story import Step
from gateway_load import Load
from hosts import PACKAGES, TestHosts
from operator_cli import Answer, Operator
from rootfs import debootstrap_tree
from story import PROGRAM, REPOSITORY, StoryFailure, expect, import_base, say, story_main, write_summary

NAME, SERVICE, FRONT = "fleet", "tree", "front"
KEY = "a-key-for-one-story"
PORT = 30080
#: Requests that must end well after a replica died.
AFTER = 12


@dataclass
class Story:
    """The steps in order. `steps` grows as they hold."""

    hosts: TestHosts
    operator: Operator
    folder: Path
    steps: list[Step] = field(default_factory=list)

    @property
    def home(self) -> str:
        return self.hosts.names[0]

    @property
    def far(self) -> str:
        return self.hosts.names[1]

    @property
    def url(self) -> str:
        return f"http://{self.hosts.address(self.home)}:{PORT}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}

    def tell(self) -> None:
        self._write_files()
        for name, work in (
            ("up", self._up),
            ("up-again", self._up_again),
            ("status", self._status),
            ("balance", self._balance),
            ("kill-replica", self._kill_replica),
            ("replica-back", self._replica_back),
            ("down", self._down),
        ):
            with self._step(name) as step:
                step.update(zip(("figure", "detail"), work(), strict=True))

    # -- steps ----------------------------------------------------------------------------------------------

    def _up(self) -> tuple[Any, str]:
        answer = self._deploy("up", timeout_s=900.0).require()
        made = sorted(answer.result["containers"])
        wanted = [f"{self.home}/{NAME}-{FRONT}-0", *(f"{one}/{NAME}-{SERVICE}-0" for one in self.hosts.names)]
        expect(made == sorted(wanted), f"containers: {made}", answer)
        size = self._run(self.home, "docker", "images", "--format", "{{.Size}}", f"ddtree/{NAME}-gateway")
        return made, f"the gateway's image has {size}"

    def _up_again(self) -> tuple[Any, str]:
        answer = self._deploy("up").require()
        expect(answer.result["changes"] == 0, f"{answer.result['changes']} changes", answer)
        return 0, "nothing changed"

    def _status(self) -> tuple[Any, str]:
        answer = self._deploy("status").require()
        (door,) = answer.result["gateways"]
        usable = sum(worker["usable"] for worker in door["workers"])
        expect(usable == 2 and door["ok"], f"gateway: {door}", answer)
        expect(KEY not in answer.log.read_text(), "the key is in what status says", answer)
        with httpx.Client(trust_env=False, timeout=60) as http:
            open_door = http.post(f"{self.url}/generate", json={"text": "x"}).status_code
        expect(open_door == 401, f"without a key the gateway answers {open_door}", answer)
        said = self._deploy("logs", FRONT).require().log.read_text()
        expect("1.13.0" in said and KEY not in said, "the gateway's log is not its own", answer)
        return usable, ", ".join(worker["url"] for worker in door["workers"])

    def _balance(self) -> tuple[Any, str]:
        load = Load(self.url, self.headers)
        with load.running():
            self._wait(lambda: len(load.requests) >= AFTER, "requests")
        shares = Counter(one.worker for one in load.requests)
        self._hold(not load.lost, f"lost: {[one for one in load.requests if not one.whole]}")
        self._hold(len(shares) == 2, f"answers from {shares}")
        return sorted(shares.values()), f"{len(load.requests)} requests over both hosts, none lost"

    def _kill_replica(self) -> tuple[Any, str]:
        """SIGKILL to the far replica with streams on it: they are lost, and nothing else is."""
        victim = f"http://{self.hosts.address(self.far)}:{30001}"
        load = Load(self.url, self.headers)
        with load.running():
            self._wait(lambda: load.streams_on(victim), "a stream on the far host")
            self._run(self.far, "docker", "kill", f"{NAME}-{SERVICE}-0")
            died = len(load.requests)
            self._wait(lambda: self._usable() == 1, "the dead replica to be left out")
            noticed = len(load.requests)
            self._wait(lambda: len(load.requests) >= noticed + AFTER, "requests after the death")
        lost = [one for one in load.requests if not one.whole]
        self._hold(
            all(one.stream and one.worker == victim and one.number < died for one in lost), f"lost: {lost}"
        )
        late = {one.worker for one in load.requests if one.number >= noticed}
        self._hold(victim not in late, f"after the death: {late}")
        others = len(load.requests) - len(lost)
        return len(lost), f"streams that had begun on it were lost; {others} other requests were not"

    def _replica_back(self) -> tuple[Any, str]:
        """The next `up` starts it; the gateway takes it back by itself and is not touched."""
        door = self._container_id()
        answer = self._deploy("up").require()
        self._hold(self._container_id() == door, "the gateway's container is another one")
        expect(answer.result["changes"] == 1, f"{answer.result['changes']} changes", answer)
        self._wait(lambda: self._usable() == 2, "both replicas")
        load = Load(self.url, self.headers)
        with load.running():
            self._wait(lambda: len({one.worker for one in load.requests} - {None}) == 2, "answers of both")
        self._hold(not load.lost, f"lost: {load.lost}")
        return 1, "one container started, the gateway took it back"

    def _down(self) -> tuple[Any, str]:
        answer = self._deploy("down", "--purge").require()
        left = [
            line
            for host in self.hosts.names
            for line in self._run(host, "docker", "ps", "--all", "--format", "{{.Names}}").split()
        ]
        ports = [one for host in self.hosts.names for one in self.hosts.listening(host) if f":{PORT}" in one]
        expect(not left and not ports, f"left: {left} {ports}", answer)
        return (
            0,
            f"{len(answer.result['removed'])} containers and {len(answer.result['images'])} images removed",
        )

    # -- helpers --------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        key = self.folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        cluster = {
            "schema": 1,
            "name": NAME,
            "engine": "reference",
            **self.hosts.cluster_keys(),
            "gpu": {"count": 0},
            "driver": {"manage": False},
            "image": {"base": BASE_TAG},
            "paths": {"min_free_gib": 1},
            "secrets": {"api_key": {"file": "key"}},
            "services": [
                {
                    "name": SERVICE,
                    "arm": "ddtree",
                    "budget": 7,
                    "port": 30001,
                    "bind": "0.0.0.0",
                    "max_running_requests": 4,
                    "extra_args": ["--threads", "1", "--self-check", "0"],
                }
            ],
            "gateways": [
                {
                    "name": FRONT,
                    "service": SERVICE,
                    "port": PORT,
                    "bind": "0.0.0.0",
                    # A dead replica refuses at once; the limit is for a living one on a busy machine.
                    "health": {"path": "/ready", "interval_s": 1, "timeout_s": 30, "failures": 2},
                    "stop_timeout_s": 30,
                }
            ],
            "monitoring": {"enabled": False},
            "deadlines": {"facts": 120, "provision": 120, "build": 600, "ready": 300, "stop": 120},
        }
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))

    def _deploy(self, verb: str, *options: str, timeout_s: float = 600.0) -> Answer:
        yes = ("--yes",) if verb == "down" else ()
        bare = ("--skip-provisioning",) if verb == "up" else ()
        arguments = ("deploy", verb, *options, "--cluster", "cluster.yaml", *yes, *bare)
        return self.operator.run(*arguments, timeout_s=timeout_s)

    def _usable(self) -> int:
        with httpx.Client(trust_env=False, timeout=60) as http:
            return int(http.get(f"{self.url}/readiness").json().get("healthy_workers", 0))

    def _container_id(self) -> str:
        return self._run(self.home, "docker", "inspect", "--format", "{{.Id}}", f"{NAME}-{FRONT}-0")

    def _run(self, host: str, *argv: str) -> str:
        return self.hosts.run(host, list(argv)).stdout.strip()

    def _wait(self, holds: Callable[[], object], what: str, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            self._hold(time.monotonic() < deadline, f"waited {seconds:g} s for {what}")
            time.sleep(0.05)

    def _hold(self, holds: bool, trouble: str) -> None:
        if not holds:
            raise StoryFailure(trouble)

    @contextmanager
    def _step(self, name: str) -> Iterator[dict[str, Any]]:
        started = time.monotonic()
        found: dict[str, Any] = {}
        yield found
        seconds = round(time.monotonic() - started, 2)
        self.steps.append(Step(name, seconds, found["figure"], found["detail"]))
        say(f"{name:15} {seconds:6.1f} s  {found['figure']}: {found['detail']}")


def main() -> int:
    folder = REPOSITORY / ".cache" / "e2e-gateway"
    return story_main(run, __doc__, folder=folder, holds="emptied; gets summary.json")


def run(folder: Path, cache: Path) -> int:
    """The whole of it, and the summary in any case. Raises what a step raises."""
    folder.mkdir(parents=True, exist_ok=True)
    tree, base = debootstrap_tree(cache, PACKAGES), base_image(cache)
    operator = Operator(PROGRAM, folder)
    with TestHosts(folder / "hosts", tree=tree) as hosts:
        story = Story(hosts, operator, folder)
        try:
            import_base(hosts, base)
            story.tell()
        finally:
            operator.close()
            write_summary(folder / "summary.json", story.steps)
    say(json.dumps({"steps": len(story.steps), "hold": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
