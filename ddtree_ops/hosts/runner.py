"""The one place that runs Ansible: every argument of ansible-runner is chosen here.

Host keys are checked. Nothing that may hold a secret outlives a run: inventory and variables go through a
private folder (0700) that is deleted, secrets of tasks through the environment, and the log that is kept is
redacted. A run without the final statistics is a failure, whatever its exit status; an unreachable host is
reported as that and as nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from ddtree_ops.errors import BadEnvironment, Interrupted, JobFailed
from ddtree_ops.hosts.inventory import Inventory

HIDDEN = "[hidden]"
#: Connections that break are tried again so many times; a host that stays away is unreachable.
SSH_RETRIES = 2
#: Shorter values would blank out half of a log.
SHORTEST_SECRET = 4


class RunStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Event:
    """Something that a person who waits wants to see."""

    host: str
    task: str
    status: str  # ok, changed, failed, unreachable, skipped


@dataclass(frozen=True)
class Change:
    """A task that changed a host, or would (with check). `diff` is empty where Ansible shows none."""

    host: str
    task: str
    diff: str = ""


@dataclass
class HostOutcome:
    """What a run did on one host."""

    ok: int = 0
    changed: int = 0
    failed: bool = False
    unreachable: bool = False
    message: str = ""


@dataclass
class Outcome:
    """What a run did. `facts` holds what the play set with set_fact, by host."""

    playbook: str
    status: RunStatus
    seconds: float
    hosts: dict[str, HostOutcome] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: Path | None = None
    reason: str = ""

    @property
    def unreachable(self) -> dict[str, str]:
        return {name: host.message for name, host in self.hosts.items() if host.unreachable}

    @property
    def failed(self) -> dict[str, str]:
        return {name: host.message for name, host in self.hosts.items() if host.failed}

    def require_ok(self) -> None:
        """Raise JobFailed with the hosts and their messages unless everything went well."""
        if self.status is RunStatus.OK:
            return
        lines = [f"{name}: {message}" for name, message in self.failed.items()]
        lines += [
            f"{name}: unreachable (left alone): {message}" for name, message in self.unreachable.items()
        ]
        lines = lines or [self.reason]
        log = f"the log is {self.log}" if self.log else None
        text = "\n".join(f"  {line}" for line in lines) if len(lines) > 1 else lines[0]
        raise JobFailed(f"{self.playbook} {self.status.value}: {text}", remedy=log)


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached."""

    known_hosts: Path | None = None
    private_key: Path | None = None
    connect_timeout_s: int = 10
    become: bool = True
    become_password: str | None = field(default=None, repr=False)


class Ansible:
    """Runs the playbooks of this package against one inventory.

    secrets     values by variable name, for tasks that look them up in the environment; hidden in logs
    log_folder  where redacted logs are kept (0600); null keeps none
    """

    def __init__(
        self,
        inventory: Inventory,
        *,
        ssh: SshOptions | None = None,
        secrets: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _require_ansible()
        self._inventory = inventory
        self._ssh = ssh or SshOptions()
        self._secrets = dict(secrets or {})
        self._log_folder = log_folder
        self._clock = clock

    def run(
        self,
        playbook: str | Path,
        *,
        variables: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        check: bool = False,
        deadline_s: float = 3600.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> Outcome:
        """Run a playbook on every host of the inventory.

        playbook   a name in the package's playbooks folder, or a path
        check      change nothing and collect what would change, with diffs
        Raises Interrupted on Ctrl-C; what the play had done by then stays.
        """
        path = playbook if isinstance(playbook, Path) else playbooks_folder() / playbook
        if not path.is_file():
            raise BadEnvironment(f"{path}: no such playbook")
        collector = _Collector(on_event)
        private = Path(tempfile.mkdtemp(prefix="ddtree-"))  # 0700
        started = self._clock()
        try:
            with _interruptible() as stopped:
                status = self._run(
                    private, path, variables or {}, tags, check, deadline_s, collector, stopped
                )
            log = self._keep_log(private, path)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        if stopped():
            raise Interrupted(f"{path.name} stopped; what it had done by then stays", remedy="run it again")
        return collector.outcome(path.name, status, self._clock() - started, log, self._inventory.names)

    def _run(
        self,
        private: Path,
        playbook: Path,
        variables: Mapping[str, Any],
        tags: Sequence[str],
        check: bool,
        deadline_s: float,
        collector: _Collector,
        stopped: Callable[[], bool],
    ) -> str:
        import ansible_runner

        _write_private(private / "variables.json", {**variables, **self._become()})
        # ansible-runner drops a settings argument where no file of settings stands.
        (private / "env").mkdir()
        _write_private(private / "env" / "settings", {"pexpect_timeout": 1})
        (private / "inventory").mkdir()
        _write_private(private / "inventory" / "hosts.json", self._inventory.for_ansible())
        run = ansible_runner.run(
            private_data_dir=str(private),
            playbook=str(playbook.resolve()),
            inventory=str(private / "inventory" / "hosts.json"),
            extravars=str(private / "variables.json"),
            tags=",".join(tags) or None,
            cmdline="--check --diff" if check else None,
            envvars=self._environment(private),
            timeout=max(1, int(deadline_s)),
            suppress_env_files=True,
            quiet=True,
            event_handler=collector.handle,
            cancel_callback=stopped,
        )
        return str(run.status)

    def _become(self) -> dict[str, Any]:
        become: dict[str, Any] = {"ansible_become": self._ssh.become}
        if self._ssh.become_password is not None:
            become["ansible_become_password"] = self._ssh.become_password
        return become if self._ssh.become else {}

    def _environment(self, private: Path) -> dict[str, str]:
        known_hosts = self._ssh.known_hosts
        ssh = ["-o StrictHostKeyChecking=yes", "-o ServerAliveInterval=15", "-o ServerAliveCountMax=4"]
        ssh += ["-o ControlMaster=auto", "-o ControlPersist=10s", "-o BatchMode=yes"]
        ssh += [f"-o UserKnownHostsFile={known_hosts.expanduser()}"] if known_hosts else []
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "ANSIBLE_CONFIG": str(playbooks_folder() / "ansible.cfg"),
            "ANSIBLE_HOST_KEY_CHECKING": "True",
            "ANSIBLE_SSH_ARGS": " ".join(ssh),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(private / "cp"),
            # Through a terminal, what a program says on stderr lands in its stdout, and the end can be lost.
            "ANSIBLE_SSH_USETTY": "False",
            "ANSIBLE_SSH_RETRIES": str(SSH_RETRIES),
            "ANSIBLE_TIMEOUT": str(self._ssh.connect_timeout_s),
            "ANSIBLE_LOCAL_TEMP": str(private / "tmp"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            **self._secrets,
        }
        if self._ssh.private_key is not None:
            environment["ANSIBLE_PRIVATE_KEY_FILE"] = str(self._ssh.private_key.expanduser())
        return environment

    def _keep_log(self, private: Path, playbook: Path) -> Path | None:
        if self._log_folder is None:
            return None
        text = "\n".join(file.read_text(errors="replace") for file in private.glob("artifacts/*/stdout"))
        self._log_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self._log_folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{playbook.stem}-{os.getpid()}.log"
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._redact(text))
        return log

    def _redact(self, text: str) -> str:
        hidden = [*self._secrets.values(), self._ssh.become_password or ""]
        for host in self._inventory.hosts:
            hidden += [str(v) for k, v in host.variables.items() if re.search("pass|token|secret|key$", k)]
        for value in sorted(set(hidden), key=len, reverse=True):
            if len(value) >= SHORTEST_SECRET:
                text = text.replace(value, HIDDEN)
        return text


def playbooks_folder() -> Path:
    """Where the playbooks are: beside the package in a checkout, else a package of their own."""
    checkout = Path(__file__).resolve().parents[2] / "playbooks"
    if (checkout / "site.yml").is_file():
        return checkout
    spec = importlib.util.find_spec("ddtree_playbooks")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / "site.yml").is_file():
            return Path(root)
    raise BadEnvironment("the playbooks are not installed", remedy="reinstall ddtree")


def _require_ansible() -> None:
    missing = [name for name in ("ansible_runner", "ansible") if importlib.util.find_spec(name) is None]
    if missing or not Path(sys.executable).with_name("ansible-playbook").exists():
        raise BadEnvironment(
            "Ansible is not installed beside this Python", remedy="pip install 'ddtree[deploy]'"
        )


def _write_private(file: Path, data: Mapping[str, Any]) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        json.dump(data, stream)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends the play instead of tearing through ansible-runner; yields whether it was pressed."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def press(number: int, frame: FrameType | None) -> None:
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _Collector:
    """Keeps of ansible-runner's events what an Outcome needs."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self._stats: Mapping[str, Mapping[str, int]] | None = None
        self._changes: list[Change] = []
        self._facts: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, str] = {}

    def handle(self, event: Mapping[str, Any]) -> bool:
        """ansible-runner's event handler; false keeps it from writing the event to a file."""
        kind, data = str(event.get("event", "")), event.get("event_data") or {}
        if kind == "playbook_on_stats":
            self._stats = {
                name: data.get(name, {}) for name in ("ok", "changed", "dark", "failures", "processed")
            }
        elif kind.startswith("runner_on_") and kind not in {"runner_on_start"}:
            self._task(kind.removeprefix("runner_on_"), data)
        return False

    def outcome(
        self, playbook: str, status: str, seconds: float, log: Path | None, names: Sequence[str]
    ) -> Outcome:
        outcome = Outcome(playbook, RunStatus.OK, seconds, changes=self._changes, facts=self._facts, log=log)
        stats = self._stats or {}
        for name in names:
            dark, failed = bool(stats.get("dark", {}).get(name)), bool(stats.get("failures", {}).get(name))
            done, changed = stats.get("ok", {}).get(name, 0), stats.get("changed", {}).get(name, 0)
            message = self._messages.get(name, "") if dark or failed or self._stats is None else ""
            outcome.hosts[name] = HostOutcome(done, changed, failed, dark, message)
        if status == "timeout":
            outcome.status, outcome.reason = RunStatus.TIMED_OUT, f"no end after {seconds:.0f} s"
        elif self._stats is None:
            outcome.status = RunStatus.FAILED
            outcome.reason = "Ansible ended without statistics: " + (self._last_words(log) or status)
        elif outcome.failed or outcome.unreachable or status != "successful":
            outcome.status, outcome.reason = RunStatus.FAILED, status
        elif not set(names) <= set(stats["processed"]):
            left = sorted(set(names) - set(stats["processed"]))
            outcome.status, outcome.reason = RunStatus.FAILED, f"no task ran on {', '.join(left)}"
        return outcome

    def _task(self, kind: str, data: Mapping[str, Any]) -> None:
        host, result = str(data.get("host", "")), data.get("res") or {}
        task = ": ".join(str(data[key]) for key in ("role", "task") if data.get(key))
        changed = kind == "ok" and bool(result.get("changed"))
        if kind == "failed" and data.get("ignore_errors"):
            kind = "ok"
        if changed:
            self._changes.append(Change(host, task, _diff(result)))
        if kind in {"failed", "unreachable"}:
            self._messages[host] = f"{task}: {_message(result)}" if kind == "failed" else _message(result)
        if kind == "ok" and data.get("resolved_action") == "ansible.builtin.set_fact":
            self._facts.setdefault(host, {}).update(result.get("ansible_facts") or {})
        if self._on_event is not None and kind in {"ok", "failed", "unreachable", "skipped"}:
            self._on_event(Event(host, task, "changed" if changed else kind))

    def _last_words(self, log: Path | None) -> str:
        with suppress(OSError):
            lines = log.read_text().strip().splitlines() if log else []
            return next((line for line in reversed(lines) if "ERROR" in line), "")
        return ""


def _message(result: Mapping[str, Any]) -> str:
    """One line that says why; of a command also the last thing that it said itself."""
    text = str(result.get("msg") or result.get("stderr") or result.get("module_stderr") or "no message")
    said = str(result.get("stderr") or result.get("stdout") or "").strip().splitlines()
    if "rc" in result and said and said[-1] not in text:
        text = f"{text}: {said[-1]}"
    return " ".join(text.split())[:500]


def _diff(result: Mapping[str, Any]) -> str:
    """Ansible's diff of a task as a few lines of text."""
    found = result.get("diff") or []
    parts = []
    for item in found if isinstance(found, list) else [found]:
        if not isinstance(item, Mapping):
            continue
        if "prepared" in item:
            parts.append(str(item["prepared"]).strip())
        elif "before" in item or "after" in item:
            header = item.get("after_header") or item.get("before_header") or ""
            parts.append(_unified(str(header), item.get("before"), item.get("after")))
    return "\n".join(part for part in parts if part)


def _unified(header: str, before: Any, after: Any) -> str:
    import difflib

    def lines(value: Any) -> list[str]:
        text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True)
        return text.splitlines()

    return "\n".join(
        difflib.unified_diff(lines(before or ""), lines(after or ""), header, header, lineterm="", n=1)
    )
