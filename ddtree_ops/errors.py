"""What can go wrong, as the user sees it: a message, a remedy and an exit code.

Exit codes: 0 done, 1 the job failed, 2 the input is wrong, 3 the environment is, 130 stopped by Ctrl-C (the
shell's own convention, 128 + SIGINT: scripts can tell "the user stopped it" from "it failed").
Commands raise these; :func:`ddtree_ops.cli.app.main` is the one place that turns them into output and
an exit status.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic alone costs `ddtree --help` a quarter of its 300 ms
    import pydantic


class ExitCode(IntEnum):
    DONE = 0
    JOB_FAILED = 1
    BAD_INPUT = 2
    BAD_ENVIRONMENT = 3
    INTERRUPTED = 130


class DdtreeError(Exception):
    """A failure with a message for the user and, where one is known, a one-line remedy."""

    exit_code: ExitCode = ExitCode.JOB_FAILED

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class JobFailed(DdtreeError):
    """The input and the machine were fine, the work was not (a server died, a gate failed)."""


class BadInput(DdtreeError):
    """What the user gave is wrong. Names the file, the key, what was found and what is allowed."""

    exit_code = ExitCode.BAD_INPUT

    @classmethod
    def at(
        cls, *, file: Path | str | None, key: str, found: object, allowed: str, remedy: str | None = None
    ) -> BadInput:
        """Build the standard message ``FILE: KEY: found X, allowed: Y``."""
        where = f"{file}: " if file is not None else ""
        return cls(f"{where}{key}: found {found!r}, allowed: {allowed}", remedy=remedy)


class BadEnvironment(DdtreeError):
    """The machine lacks something (a package, a free port, disk space, a GPU)."""

    exit_code = ExitCode.BAD_ENVIRONMENT


class Interrupted(DdtreeError):
    """The user stopped the work; says what was kept and how to go on."""

    exit_code = ExitCode.INTERRUPTED


def from_validation(error: pydantic.ValidationError, *, file: Path | str | None) -> BadInput:
    """Turn pydantic's errors into one :class:`BadInput`, a line for each wrong key."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "(top level)"
        found = "" if item["type"] in {"missing", "extra_forbidden"} else f", found {item['input']!r}"
        lines.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{found}")
    where = f"{file}: " if file is not None else ""
    if len(lines) == 1:
        return BadInput(where + lines[0])
    return BadInput(f"{where}{len(lines)} errors\n" + "\n".join(f"  {line}" for line in lines))
