"""How the stories on test hosts run a command: what it said is kept, and nothing of it outlives them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "e2e"))

from operator_cli import CommandFailure, Operator


def _program(folder: Path, script: str) -> Path:
    """A command of this script; it is called with --json first, as `ddtree` is."""
    file = folder / "program"
    file.write_text(f'#!/bin/sh\n[ "$1" = --json ] || exit 64\nshift\n{script}\n')
    file.chmod(0o755)
    return file


def test_an_answer_has_the_events_and_leaves_other_lines_in_the_log(tmp_path: Path) -> None:
    said = [{"event": "note", "text": "a"}, {"event": "result", "changes": 3}]
    lines = "; ".join(f"echo '{json.dumps(one)}'" for one in said)

    answer = Operator(_program(tmp_path, f"{lines}; echo oops >&2; echo '[1]'"), tmp_path).run("deploy", "up")

    assert answer.code == 0
    assert list(answer.events) == said
    assert answer.result["changes"] == 3
    assert answer.log.name == "01-deploy-up.log"
    assert "oops" in answer.log.read_text()


def test_an_unexpected_end_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    answer = Operator(_program(tmp_path, "echo it broke; exit 3"), tmp_path).run("deploy", "up")

    with pytest.raises(CommandFailure, match=r"ddtree deploy up\nended with 3, expected 0.*\n  it broke"):
        answer.require()
    with pytest.raises(CommandFailure, match="gave no result"):
        _ = answer.result


def test_waiting_for_an_event_ends_when_the_command_does(tmp_path: Path) -> None:
    command = Operator(_program(tmp_path, 'echo \'{"event": "note"}\''), tmp_path).start("bench", "sweep")
    started = time.monotonic()

    with pytest.raises(CommandFailure, match="never came to its load"):
        command.wait_for(lambda events: len(events) > 1, "its load", 600.0)

    assert time.monotonic() - started < 200


def test_a_half_written_line_is_no_event_yet(tmp_path: Path) -> None:
    script = 'printf \'{"event": "a"}\\n{"event": "b"}\'; sleep 0.5; echo'
    command = Operator(_program(tmp_path, script), tmp_path).start("deploy", "up")

    command.wait_for(lambda events: len(events) == 1, "its first event", 60.0)

    assert [event["event"] for event in command.finish(60.0).events] == ["a", "b"]


@pytest.mark.parametrize("how", ["late", "closed"])
def test_a_command_ends_with_all_that_it_started(tmp_path: Path, how: str) -> None:
    operator = Operator(_program(tmp_path, f"setsid sleep 300 & echo $! > {tmp_path}/child; wait"), tmp_path)
    command = operator.start("deploy", "up")
    child = tmp_path / "child"
    command.wait_for(lambda _: child.exists() and child.read_text().endswith("\n"), "its child", 60.0)

    if how == "late":
        assert command.finish(0.1).code == -1
    else:
        operator.close()

    deadline = time.monotonic() + 120
    while psutil.pid_exists(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
