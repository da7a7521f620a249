from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.environment import capture_environment
from ddtree_ops.bench.store import Store
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.schemas.results import CellRecord, CellState, RunRecord
from tests.support.ops import cell_spec, request_row

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create_or_open(tmp_path / "results", now=NOW)


def record(**changes: Any) -> CellRecord:
    spec = changes.pop("spec", cell_spec())
    fields: dict[str, Any] = {
        "key": spec.key(),
        "spec": spec,
        "run_id": "r",
        "state": CellState.COMPLETE,
        "started": NOW,
        "ended": NOW,
        "requests": 2,
        "failed_requests": 0,
        "rows_sha256": "",
    }
    return CellRecord(**{**fields, **changes})


ROWS = [request_row(0), request_row(1)]


def test_a_sealed_cell_reads_back(store: Store) -> None:
    sealed = store.seal(record(state=CellState.FAILED, reason="why"), ROWS, {"ar.log": "tail"})
    assert store.cell(sealed.key) == sealed
    assert store.rows(sealed.key) == ROWS
    folder = store.root / "cells" / sealed.key[:16]
    assert (folder / "reason.txt").read_text() == "why\n"
    assert (folder / "logs" / "ar.log").read_text() == "tail"


def test_a_sealed_cell_is_never_overwritten(store: Store) -> None:
    sealed = store.seal(record(), ROWS, {})
    with pytest.raises(BadEnvironment):
        store.seal(record(), ROWS[:1], {})
    assert store.rows(sealed.key) == ROWS
    assert [path.name for path in (store.root / "cells").iterdir()] == [sealed.key[:16]]


def test_rows_that_were_changed_after_sealing_are_refused(store: Store) -> None:
    sealed = store.seal(record(), ROWS, {})
    path = store.root / "cells" / sealed.key[:16] / "rows.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"e2e_s": 1.0', b'"e2e_s": 0.5'))
    with pytest.raises(BadInput, match="changed after its cell was sealed"):
        store.rows(sealed.key)


def test_a_corrupt_cell_is_named(store: Store) -> None:
    sealed = store.seal(record(), ROWS, {})
    path = store.root / "cells" / sealed.key[:16] / "cell.json"
    path.write_text("{")
    with pytest.raises(BadInput, match=r"cell\.json is corrupt"):
        store.cell(sealed.key)
    path.write_text(json.dumps({"key": "x"}))
    with pytest.raises(BadInput, match=r"cell\.json: \d+ errors"):
        store.cell(sealed.key)


def test_a_cell_of_another_key_in_its_place_is_refused(store: Store) -> None:
    sealed = store.seal(record(), ROWS, {})
    other = sealed.key[:16] + "0" * 48
    with pytest.raises(BadInput, match="key: found"):
        store.cell(other)


def test_finished_rounds_are_kept_until_the_cell_is_sealed(store: Store) -> None:
    key = record().key
    assert store.partial(key) == []
    store.append_partial(key, ROWS[:1])
    store.append_partial(key, ROWS[1:])
    assert store.partial(key) == ROWS
    store.seal(record(), ROWS, {})
    assert store.partial(key) == []


@pytest.mark.parametrize("torn", [b'{"prompt_id": "p9", "prom', b"\x00\x00\x00"])
def test_a_line_torn_by_a_crash_is_dropped_for_good(store: Store, torn: bytes) -> None:
    key = record().key
    store.append_partial(key, ROWS[:1])
    path = store.root / "partial" / f"{key[:16]}.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    assert store.partial(key) == ROWS[:1]
    store.append_partial(key, ROWS[1:])
    assert store.partial(key) == ROWS


def test_setting_aside_keeps_every_old_record(store: Store) -> None:
    key = record().key
    for number in (1, 2):
        store.seal(record(requests=number), ROWS, {})
        store.set_aside(key)
    assert store.cell(key) is None
    assert sorted(path.name for path in (store.root / "aside").iterdir()) == [
        f"{key[:16]}.1",
        f"{key[:16]}.2",
    ]


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for opening in (lambda: Store.create_or_open(tmp_path, now=NOW), lambda: Store.open(tmp_path)):
        with pytest.raises(BadInput, match="not a results folder") as caught:
            opening()
        assert caught.value.remedy
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]
    with pytest.raises(BadInput, match="is a file"):
        Store.create_or_open(tmp_path / "notes.txt", now=NOW)
    with pytest.raises(BadInput, match="does not exist"):
        Store.open(tmp_path / "none")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("{", "corrupt"),
        ("[]", "not a results folder"),
        ('{"kind": "other", "schema_version": 1}', "not a results folder"),
        ('{"kind": "ddtree-results", "schema_version": 2}', "schema_version 2 is newer"),
        ('{"kind": "ddtree-results", "schema_version": 0}', "schema_version"),
        ('{"kind": "ddtree-results", "schema_version": 1, "created": "x"}', "ddtree_version"),
    ],
)
def test_bad_headers_are_refused(store: Store, header: str, complaint: str) -> None:
    (store.root / "store.json").write_text(header)
    with pytest.raises(BadInput, match=complaint):
        Store.create_or_open(store.root, now=NOW)


def test_two_writers_on_one_store_are_refused(store: Store) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom ddtree_ops.bench.store import Store\n"
        "with Store(Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(BadEnvironment, match=f"in use by another sweep .process {other.pid}"),
            store.lock(),
        ):
            pass
    finally:
        other.kill()
        other.communicate()
    with store.lock():  # a crashed writer leaves no lock behind
        pass


def test_run_ids_do_not_collide(store: Store) -> None:
    first = store.new_run_id("20260101T000000Z", "x")
    run = RunRecord(
        run_id=first, name="x", started=NOW, sweep={}, environment=capture_environment(), cells=[]
    )
    store.write_run(run)
    assert first == "20260101T000000Z-x"
    assert store.new_run_id("20260101T000000Z", "x") == "20260101T000000Z-x-2"


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> Iterator[None]:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        yield


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_loses_nothing_that_is_sealed(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    done = store.seal(record(spec=cell_spec(seed=1)), ROWS, {})
    store.append_partial(record().key, ROWS)
    with full_disk(monkeypatch, number), pytest.raises(BadEnvironment, match="disk is full") as caught:
        store.seal(record(), ROWS, {"x.log": "tail"})
    assert "same command again" in (caught.value.remedy or "")
    assert store.cell(done.key) == done
    assert store.partial(record().key) == ROWS
    assert [path.name for path in (store.root / "cells").iterdir()] == [done.key[:16]]
    store.seal(record(), ROWS, {})
    assert store.rows(record().key) == ROWS


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs: needs root and CAP_SYS_ADMIN")
    try:
        store = Store.create_or_open(tmp_path / "results", now=NOW)
        done = store.seal(record(), ROWS, {})
        big = cell_spec(seed=1)
        with pytest.raises(BadEnvironment, match="disk is full"):
            store.seal(record(spec=big), [request_row(n, output=range(500)) for n in range(100)], {})
        assert store.rows(done.key) == ROWS
        assert store.cell(big.key()) is None
        store.seal(record(spec=big), ROWS, {})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
