"""The lock file beside cluster.yaml, and the lock that keeps two deploys apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.deploy.lockfile import LockFile, exclusively, lock_path, read_lock, write_lock
from ddtree_ops.errors import BadEnvironment, BadInput

from .clusters import cards


def test_what_was_found_out_is_there_again_and_equal_content_is_not_written_twice(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    lock = read_lock(file).with_cards({"a": cards(2)}).with_revisions({"o/m@main": "c" * 40})
    write_lock(file, lock)
    path = lock_path(file)
    assert path.name == "cluster.lock.json"
    assert read_lock(file) == lock
    assert read_lock(file).cards_of("a") == cards(2)
    assert read_lock(file).cards_of("b") == ()
    before = path.stat().st_ino
    write_lock(file, lock)
    assert path.stat().st_ino == before


def test_an_empty_lock_makes_no_file(tmp_path: Path) -> None:
    write_lock(tmp_path / "cluster.yaml", LockFile())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "other": 1}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    lock_path(tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(BadInput, match=r"cluster\.lock\.json: cannot be read"):
        read_lock(tmp_path / "cluster.yaml")


HOLDER = """
import sys
from pathlib import Path
from ddtree_ops.deploy.lockfile import exclusively
with exclusively(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_deploy_is_refused_at_once_and_may_come_later(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    argv = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BadEnvironment, match="another `ddtree deploy` works"), exclusively(file):
            pass
        other.communicate("", timeout=60)
    with exclusively(file):
        pass
