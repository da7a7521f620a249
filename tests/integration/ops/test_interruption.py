"""What is left when a sweep is stopped, killed, run twice or runs out of disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddtree_ops.cli.app import run
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellState
from ddtree_ops.services.base import Identity, ServiceSpec
from ddtree_ops.services.local import LocalLauncher
from tests.integration.ops.conftest import Sweeper
from tests.support.ops import STUB, start_ddtree, stub_sweep, write_checkpoint

Wait = Callable[..., None]


def kept_rows(results: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in results.glob("partial/*.jsonl"))


def servers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(servers: list[psutil.Process]) -> bool:
    return not any(server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in servers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_keeps_finished_rounds_and_goes_on(
    tmp_path: Path, sweeper: Sweeper, wait_for: Wait, number: signal.Signals
) -> None:
    slow = stub_sweep(tmp_path, "*:delay:15", prompts=6)
    process = start_ddtree("bench", "sweep", slow, "--results", sweeper.results)
    wait_for(lambda: kept_rows(sweeper.results) >= 4, "two finished rounds")
    servers = servers_of(process)
    assert len(servers) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; 0 of 2 cells are sealed and finished rounds are kept" in errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    assert gone(servers)
    kept = kept_rows(sweeper.results)
    assert kept % 2 == 0
    assert sweeper(slow) == 0, sweeper.events[-1]
    first, second = (json.loads(path.read_text()) for path in sorted(sweeper.results.glob("runs/*/run.json")))
    assert first["ended"] is None
    for cell in sweeper.cells().values():
        rows = sweeper.store.rows(cell.key)
        assert sorted(row.prompt_index for row in rows) == list(range(6))
        assert len({row.order for row in rows}) == 6
        assert sum(row.sent_at < _unix(second["started"]) for row in rows) == kept / 2
    assert kept_rows(sweeper.results) == 0


def _unix(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp()


def test_a_stop_while_services_start_leaves_none(tmp_path: Path, wait_for: Wait) -> None:
    process = start_ddtree(
        "bench", "sweep", stub_sweep(tmp_path, "*:never-ready"), "--results", tmp_path / "r"
    )
    wait_for(lambda: len(servers_of(process)) == 2, "both services")
    servers = servers_of(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert gone(servers)


def test_a_killed_sweep_leaves_no_server_behind(tmp_path: Path, sweeper: Sweeper, wait_for: Wait) -> None:
    slow = stub_sweep(tmp_path, "*:delay:15", "*:ignore-sigterm", prompts=6)
    process = start_ddtree("bench", "sweep", slow, "--results", sweeper.results)
    wait_for(lambda: kept_rows(sweeper.results) >= 2, "a finished round")
    servers = servers_of(process)
    assert len(servers) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: gone(servers), "the servers to die with their sweep")
    mended = stub_sweep(tmp_path, "*:delay:15", "*:ignore-sigterm", prompts=6)
    assert (
        run(["bench", "sweep", str(mended), "--results", str(sweeper.results), "--dry-run", "--quiet"]) == 0
    )


def test_two_sweeps_on_one_store_are_refused(tmp_path: Path, sweeper: Sweeper, wait_for: Wait) -> None:
    slow = stub_sweep(tmp_path, "*:delay:30", prompts=6)
    process = start_ddtree("bench", "sweep", slow, "--results", sweeper.results)
    try:
        wait_for(lambda: (sweeper.results / ".lock-owner").exists(), "the first sweep to hold the store")
        assert sweeper(slow) == 3
        assert f"in use by another sweep (process {process.pid})" in sweeper.error()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert sweeper(slow, "--dry-run") == 0


def test_a_disk_that_fills_up_in_mid_sweep_loses_nothing(
    tmp_path: Path, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stub_sweep(tmp_path, prompts=5)
    real, count = os.fsync, 0

    def fill_up(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_up)
        assert sweeper(path) == 3
    assert "the disk is full" in sweeper.error()
    assert kept_rows(sweeper.results) > 0
    assert sweeper(path) == 0, sweeper.events[-1]
    assert {cell.state for cell in sweeper.cells().values()} == {CellState.COMPLETE}
    assert all(len(sweeper.store.rows(cell.key)) == 5 for cell in sweeper.cells().values())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"notes.txt": "mine"}, "not a results folder"),
        ({"store.json": "{oops"}, "is corrupt"),
        ({"store.json": '{"kind": "ddtree-results", "schema_version": 2}'}, "schema_version 2 is newer"),
    ],
)
def test_a_folder_that_is_no_store_of_ours_is_left_alone(
    tmp_path: Path, sweeper: Sweeper, content: dict[str, str], complaint: str
) -> None:
    sweeper.results.mkdir()
    for name, text in content.items():
        (sweeper.results / name).write_text(text)
    assert sweeper(stub_sweep(tmp_path)) == 2
    assert complaint in sweeper.error()
    assert sorted(path.name for path in sweeper.results.iterdir()) == sorted(content)


def test_a_bad_dataset_line_is_named_before_anything_starts(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "*:exit-at-start:1")
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("not json\n")
    assert sweeper(path) == 2
    assert "prompts.jsonl:5: not JSON" in sweeper.error()


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, wait_for: Wait) -> None:
    script = f"trap '' TERM; sleep 1000 & {' '.join(STUB)} \"$@\""
    folder = write_checkpoint(tmp_path / "m")
    identity = Identity("reference", "1", "m", None, "float32", None, None, ())
    argv = ("sh", "-c", script, "stub", "--arm", "ar", "--model", str(folder), "--fault", "ar:ignore-sigterm")
    service = LocalLauncher(tmp_path, grace_s=0.5).create(ServiceSpec("ar", Arm.AR, None, identity, argv))
    service.start()
    assert service.pid is not None
    wait_for(lambda: len(psutil.Process(service.pid).children(recursive=True)) >= 2, "the whole family")
    family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    service.stop()
    wait_for(lambda: gone(family), "the family to end", 5)
    assert service.exit_code() == -signal.SIGKILL
    service.stop()
