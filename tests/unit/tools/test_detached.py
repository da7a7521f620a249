"""A command that outlives its call, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DETACHED = Path(__file__).parents[3] / "tools" / "gpu" / "detached.py"
# Writes a result, says so, and goes on when it is told to by a file.
PATIENT = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
(out / "first.json").write_text("1")
(out / "second.json.part").write_text("half")
print("first is there", os.environ["OUT"] == str(out), pathlib.Path("code.txt").read_text(), flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
(out / "second.json").write_text("2")
print("second is there", pathlib.Path("code.txt").read_text(), flush=True)
sys.exit(3)
"""


@pytest.fixture
def place(tmp_path):
    for name in ("tree", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "tree" / "code.txt").write_text("as it was started")
    (tmp_path / "tree" / "patient.py").write_text(PATIENT)
    yield tmp_path
    (tmp_path / "go").touch()
    run(tmp_path, "wait", "it", "--seconds", "60", "--out", str(tmp_path / "last"))


def run(place, *words):
    return subprocess.run(
        [sys.executable, str(DETACHED), *words],
        cwd=place / "tree",
        env=os.environ | {"TMPDIR": str(place / "temporary")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def started(place):
    return run(place, "start", "it", "--", sys.executable, "patient.py", "{out}", str(place / "go"))


def waited(place, seconds):
    return run(place, "wait", "it", "--seconds", str(seconds), "--out", str(place / "out"))


def begun(place):
    """Waits until it has printed its first line; the wait that saw it."""
    for _ in range(600):
        found = waited(place, 0.1)
        if "first is there" in found.stdout:
            return found
    raise AssertionError(found)


def test_results_come_call_by_call_and_the_status_at_the_end(place):
    assert started(place).returncode == 0
    found = begun(place)
    assert found.returncode == 75
    assert "still running" in found.stdout
    out = place / "out"
    assert sorted(path.name for path in out.iterdir()) == ["first.json", "it.log"]
    (place / "go").touch()
    found = waited(place, 60)
    assert found.returncode == 3
    assert "second is there" in found.stdout
    assert (out / "second.json").read_text() == "2"
    assert "second is there" in (out / "it.log").read_text()


def test_the_code_that_runs_does_not_change_with_the_tree(place):
    started(place)
    begun(place)
    (place / "tree" / "code.txt").write_text("of the next call")
    (place / "go").touch()
    assert "second is there as it was started" in waited(place, 60).stdout


def test_a_second_start_is_refused_while_the_first_runs_and_begins_anew_after_it(place):
    started(place)
    begun(place)
    assert started(place).returncode == 2
    (place / "go").touch()
    assert waited(place, 60).returncode == 3
    assert started(place).returncode == 0
    found = waited(place, 60)
    assert found.returncode == 3
    assert found.stdout.count("second is there") == 1


def test_a_command_that_was_killed_with_its_shell_counts_as_failed(place):
    process = int(started(place).stdout.split()[-1])
    begun(place)
    os.killpg(process, signal.SIGKILL)
    found = waited(place, 60)
    assert found.returncode == 1
    assert "was killed" in found.stderr


def test_waiting_for_what_was_never_started_is_told(place):
    assert waited(place, 1).returncode == 2
    assert run(place, "start", "no/name", "--", "true").returncode == 2
    assert run(place, "start", "it").returncode == 2
