#!/usr/bin/env python3
"""Run a long command where one call may take ten minutes only: start it, then wait for it call by call.

    python3 tools/gpu/detached.py start NAME -- python3 tools/gpu/engine_plan.py --stages d --out {out}
    python3 tools/gpu/detached.py wait NAME --seconds 585 --out $OUT

`start` copies the current folder, so that the code of a running command does not change when the next call
brings a new tree, and runs the command there in a session of its own; `{out}` in it, and the variable OUT,
is the folder for its results. `wait` prints what the command prints, copies the results so far and the log
into `--out`, and exits with the command's status once it has ended, with 75 as long as it runs. Unfinished
files have names that end in `.part` and are not copied. Everything lies in `ddtree-NAME` in the folder of
temporary files. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STILL_RUNNING = 75  # EX_TEMPFAIL
# Of what was printed before this call; and how often the log is looked at and the results are copied.
TAIL_BYTES, LOOK_SECONDS, COPY_SECONDS = 3000, 0.2, 60.0
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", ".*_cache", "*.egg-info")
# A shell outlives whatever the command dies of. The status appears whole or not at all.
RUN = '"$@"; echo $? >"$0.part"; mv "$0.part" "$0"'


def main() -> int:
    options = parse_options()
    folder = Path(tempfile.gettempdir()) / f"ddtree-{options.name}"
    if options.verb == "wait":
        return wait(folder, options.seconds, options.out)
    return start(folder, options.command)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("start", help="run a command that outlives this call")
    starting.add_argument("name", help="letters, digits and _")
    starting.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    waiting = verbs.add_parser("wait", help="print what it prints, bring its results")
    waiting.add_argument("name")
    waiting.add_argument("--seconds", type=float, default=585.0, help="at most")
    waiting.add_argument("--out", type=Path, required=True, help="where results are copied to")
    options = parser.parse_args()
    if not options.name.isidentifier():
        parser.error(f"NAME: found {options.name!r}, allowed are letters, digits and _")
    if options.verb == "start":
        options.command = options.command[options.command[:1] == ["--"] :]
        if not options.command:
            parser.error("found no command after --")
    return options


def start(folder: Path, command: list[str]) -> int:
    """Start a command that outlives this process; 2 while the last one of its name runs."""
    if running(folder):
        print(f"{folder.name}: is running, wait for it first", file=sys.stderr)
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    out, tree = folder / "out", folder / "tree"
    out.mkdir(parents=True)
    shutil.copytree(Path.cwd(), tree, symlinks=True, ignore=NOT_COPIED)
    argv = [word.replace("{out}", str(out)) for word in command]
    # The lock tells whether it runs: it goes with the last process that holds the file.
    with (folder / "lock").open("w") as lock, (folder / "log").open("w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process = subprocess.Popen(
            ["sh", "-c", RUN, str(folder / "status"), *argv],
            cwd=tree,
            env=os.environ | {"OUT": str(out), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
        )
    print(f"{folder.name}: started as process {process.pid}", flush=True)
    return 0


def wait(folder: Path, seconds: float, out: Path) -> int:
    """Wait at most so long; the command's status, 75 while it runs, 1 if it was killed, 2 for none."""
    if not folder.is_dir():
        print(f"{folder.name}: was not started", file=sys.stderr)
        return 2
    deadline = copy_at = time.monotonic()
    deadline += seconds
    with (folder / "log").open("rb") as log:
        log.seek(max(0, (folder / "log").stat().st_size - TAIL_BYTES))
        while True:
            # Asked before the last look: what an ended command printed and wrote is whole.
            alive = running(folder)
            print(log.read().decode(errors="replace"), end="", flush=True)
            over = not alive or time.monotonic() > deadline
            if over or time.monotonic() > copy_at:
                bring(folder, out)
                copy_at = time.monotonic() + COPY_SECONDS
            if over:
                break
            time.sleep(LOOK_SECONDS)
    if alive:
        print(f"\n{folder.name}: still running", flush=True)
        return STILL_RUNNING
    try:
        status = int((folder / "status").read_text())
    except FileNotFoundError:
        print(f"\n{folder.name}: was killed", file=sys.stderr)
        return 1
    print(f"\n{folder.name}: ended with {status}", flush=True)
    return status


def running(folder: Path) -> bool:
    """Whether the command's process holds its lock."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def bring(folder: Path, out: Path) -> None:
    """Copy the results so far and the log."""
    shutil.copytree(folder / "out", out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.part"))
    shutil.copyfile(folder / "log", out / f"{folder.name.removeprefix('ddtree-')}.log")


if __name__ == "__main__":
    sys.exit(main())
