"""The `ddtree` command as a user types it: a process of its own, with all that it says kept in a folder."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Event = Mapping[str, Any]
TAIL_LINES = 40
STOP_SECONDS = 20.0


class CommandFailure(RuntimeError):
    """A command ended otherwise than it should; the message holds the end of what it said."""


@dataclass(frozen=True)
class Answer:
    """What a command said with ``--json``: its events, and how it ended. Seconds of wall time."""

    argv: tuple[str, ...]
    code: int
    events: tuple[Event, ...]
    seconds: float
    log: Path

    @property
    def result(self) -> Event:
        """The command's answer. Raises CommandFailure where it gave none."""
        found = [event for event in self.events if event["event"] == "result"]
        if not found:
            raise CommandFailure(self.text("gave no result"))
        return found[-1]

    def require(self, code: int = 0) -> Answer:
        if self.code != code:
            raise CommandFailure(self.text(f"ended with {self.code}, expected {code}"))
        return self

    def text(self, trouble: str) -> str:
        """The trouble with the end of the log, for people."""
        tail = "\n".join(f"  {line[:600]}" for line in self.log.read_text().splitlines()[-TAIL_LINES:])
        return f"{shlex.join(self.argv)}\n{trouble}; {self.log}:\n{tail}"


class Command:
    """A command that runs. `program` is the path of `ddtree`; it and its children end together."""

    def __init__(self, program: Path, arguments: tuple[str, ...], log: Path, cwd: Path) -> None:
        self._argv = ("ddtree", *arguments)
        self._log = log
        self._started = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(program), "--json", *arguments], stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, cwd=cwd, start_new_session=True, env=_environment(),
            )  # fmt: skip

    def events(self) -> tuple[Event, ...]:
        """What it said so far; lines that are no events are for people alone."""
        lines = self._log.read_text(errors="replace").splitlines(keepends=True)
        return tuple(event for line in lines if line.endswith("\n") and (event := _event(line)) is not None)

    def wait_for(self, holds: Callable[[tuple[Event, ...]], bool], what: str, timeout_s: float) -> None:
        """Return once the events so far satisfy a condition. Raises CommandFailure when it ends before."""
        deadline = time.monotonic() + timeout_s
        while not holds(self.events()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise CommandFailure(self.finish(1.0).text(f"never came to {what}"))
            time.sleep(0.05)

    def finish(self, timeout_s: float) -> Answer:
        """Wait for its end; what takes longer is stopped as by Ctrl-C, then ended."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            code = -1
        seconds = time.monotonic() - self._started
        return Answer(self._argv, code, self.events(), seconds, self._log)

    def end(self) -> None:
        """Stop it as Ctrl-C does; what of its children does not listen is killed."""
        if self._process.poll() is not None:
            return
        # Ansible's processes have sessions of their own, where no signal to ours arrives.
        family = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()


class Operator:
    """Whoever sits at the machine and types. Logs are numbered in the order of the commands."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._logs = folder / "commands"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._running: list[Command] = []
        self._count = 0

    def start(self, *arguments: str) -> Command:
        self._count += 1
        words = "-".join(word for word in arguments[:2] if not word.startswith("-"))
        command = Command(
            self._program, arguments, self._logs / f"{self._count:02d}-{words}.log", self._folder
        )
        self._running.append(command)
        return command

    def run(self, *arguments: str, timeout_s: float = 300.0) -> Answer:
        return self.start(*arguments).finish(timeout_s)

    def close(self) -> None:
        """End what still runs."""
        for command in self._running:
            command.end()


def _event(line: str) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _environment() -> dict[str, str]:
    """As on a machine of an operator: no settings of tests, and one thread for each of many processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    return {**kept, "OMP_NUM_THREADS": "1"}
