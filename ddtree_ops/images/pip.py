"""The one place that runs pip: this Python's own, as the user has configured it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadEnvironment, JobFailed
from ddtree_ops.redact import redact_text

TAIL_LINES = 12


def run_pip(
    arguments: Sequence[str | Path], what: str, *, timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """`python -m pip ARGUMENTS`. Raises JobFailed with the end of its output, BadEnvironment without pip."""
    if importlib.util.find_spec("pip") is None:
        raise BadEnvironment(
            f"{what}: this Python has no pip", remedy=f"{sys.executable} -m ensurepip, or uv pip install pip"
        )
    options = ("--disable-pip-version-check", "--no-input", "--quiet")
    run_tool(
        [sys.executable, "-m", "pip", *options, *map(str, arguments)], what, timeout_s=timeout_s, env=env
    )


def run_tool(
    command: Sequence[str],
    what: str,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> str:
    """Run to the end and return stdout. Raises JobFailed."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            umask=0o022,  # modes go into a wheel: equal sources, equal bytes
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(
            f"{what}: not done after {timeout_s:.0f} s", remedy="raise deadlines.build"
        ) from error
    if done.returncode != 0:
        tail = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).splitlines()[-TAIL_LINES:])
        raise JobFailed(
            f"{what}: status {done.returncode}\n{redact_text(tail)}",
            remedy="the lines above are pip's own: network, index and constraints are those of pip here",
        )
    return done.stdout


def would_install(requirement: str, target: Sequence[str], *, timeout_s: float) -> Mapping[str, Any]:
    """The metadata of the distribution that pip would take for a requirement; nothing is downloaded for it.

    target  pip's options that name the Python and platform
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--target",
            folder,
            "--report",
            str(report),
        ]
        run_pip(["install", *options, *target, requirement], f"look for {requirement}", timeout_s=timeout_s)
        found: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
        return found
