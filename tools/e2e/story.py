"""What every story on the test hosts has: its command line, its summary, and how a step fails."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base_image import BASE_TAG
from hosts import HostFailure, TestHosts, missing_commands
from operator_cli import Answer, CommandFailure
from rootfs import RootfsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("ddtree")
SCHEMA = 1


class StoryFailure(RuntimeError):
    """A step found something else than it promises."""


def story_main(run: Callable[[Path, Path], int], doc: str | None, *, folder: Path, holds: str) -> int:
    """The command line of a story: `run` gets the folder to write to and the one with Debian trees.

    folder, holds  the default of --folder, and what goes there
    Returns the exit code: 1 a step failed, 3 the machine lacks a command, 130 stopped by Ctrl-C.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=folder, help=holds)
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "e2e", help="of Debian trees")
    arguments = parser.parse_args()
    missing = missing_commands()
    if missing:
        print(f"error: needs {', '.join(missing)}", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(arguments.folder.resolve(), arguments.cache.resolve())
    except (CommandFailure, HostFailure, RootfsError, StoryFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def import_base(hosts: TestHosts, archive: Path) -> None:
    """What a host without a registry has: a base that somebody loaded there."""
    host = hosts.names[0]
    place = hosts.root(host) / "root" / "base.tar"
    shutil.copyfile(archive, place)
    hosts.run(host, ["docker", "import", "/root/base.tar", BASE_TAG], timeout_s=300.0)
    place.unlink()


def expect(holds: bool, trouble: str, answer: Answer) -> None:
    if not holds:
        raise StoryFailure(answer.text(trouble))


def write_summary(path: Path, steps: Sequence[DataclassInstance]) -> None:
    summary: dict[str, Any] = {"schema": SCHEMA, "steps": [asdict(step) for step in steps]}
    path.write_text(json.dumps(summary, indent=1) + "\n")


def say(text: str) -> None:
    print(text, flush=True)
