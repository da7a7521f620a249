"""The results store: cells are sealed once, nothing is overwritten, and one sweep writes at a time.

Files are written to a temporary name, synced and renamed; a cell's folder appears whole or not at all.
Finished rounds of cells that are not sealed yet lie in `partial/<key[:16]>.jsonl`, so that an interrupted
sweep goes on where it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import filelock
import pydantic

from ddtree_ops import __version__
from ddtree_ops.errors import BadEnvironment, BadInput, from_validation
from ddtree_ops.files import sync_folder, write_atomic, write_synced
from ddtree_ops.schemas.results import RESULTS_SCHEMA, CellRecord, Record, RequestRow, RunRecord, StoreHeader

KEY_CHARS = 16
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

R = TypeVar("R", bound=Record)


class Store:
    """A results folder that exists and is of our schema. See `schemas/results.py` for its layout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create_or_open(cls, root: Path, *, now: str) -> Store:
        """Open the store, or make one where the folder is missing or empty.

        now  UTC, ISO 8601
        Raises BadInput as `open` does, BadEnvironment when the folder cannot be written.
        """
        if root.exists() and not root.is_dir():
            raise BadInput(f"{root} is a file; results need a folder")
        if not root.is_dir() or not any(root.iterdir()):
            with _writing(root):
                root.mkdir(parents=True, exist_ok=True)
                header = StoreHeader(created=now, ddtree_version=__version__)
                write_atomic(root / "store.json", _dump(header))
        return cls.open(root)

    @classmethod
    def open(cls, root: Path) -> Store:
        """Open an existing store.

        Raises BadInput for a missing or foreign folder, a newer schema, or a corrupt header.
        """
        path = root / "store.json"
        if not root.is_dir():
            raise BadInput(f"results folder {root} does not exist")
        if not path.is_file():
            raise BadInput(
                f"{root} is not a results folder of ddtree (no store.json) and is not empty",
                remedy="give a new or empty folder",
            )
        data = _read_json(path)
        if not isinstance(data, dict) or data.get("kind") != "ddtree-results":
            raise BadInput(f"{path}: not a results folder of ddtree", remedy="give a new or empty folder")
        version = data.get("schema_version")
        if isinstance(version, int) and version > RESULTS_SCHEMA:
            raise BadInput(
                f"{path}: schema_version {version} is newer than this ddtree can read ({RESULTS_SCHEMA})",
                remedy="upgrade ddtree, or give another folder",
            )
        _validated(StoreHeader, data, path)
        return cls(root)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store for writing. Raises BadEnvironment when another sweep holds it."""
        owner = self.root / ".lock-owner"
        try:
            held = filelock.FileLock(self.root / ".lock", timeout=0)
            held.acquire()
        except filelock.Timeout:
            pid = owner.read_text(encoding="utf-8").strip() if owner.is_file() else "unknown"
            raise BadEnvironment(
                f"results folder {self.root} is in use by another sweep (process {pid})",
                remedy="wait for it, or give another --results folder",
            ) from None
        except OSError as error:
            raise BadEnvironment(f"results folder {self.root} cannot be locked: {error.strerror}") from error
        try:
            with _writing(owner):
                owner.write_text(f"{os.getpid()}\n", encoding="utf-8")
            yield
        finally:
            owner.unlink(missing_ok=True)
            held.release()

    def cell(self, key: str) -> CellRecord | None:
        """The sealed cell of this key. Raises BadInput when its file is corrupt."""
        path = self._cell(key) / "cell.json"
        if not path.is_file():
            return None
        record = _validated(CellRecord, _read_json(path), path)
        if record.key != key:
            raise BadInput(
                f"{path}: key: found {record.key}, allowed: {key}", remedy="move the cell's folder away"
            )
        return record

    def rows(self, key: str) -> list[RequestRow]:
        """The rows of a sealed cell. Raises BadInput when they are not those that were sealed."""
        path = self._cell(key) / "rows.jsonl"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from error
        record = self.cell(key)
        if record is None or hashlib.sha256(data).hexdigest() != record.rows_sha256:
            raise BadInput(
                f"{path} was changed after its cell was sealed",
                remedy="move the cell's folder away and sweep again",
            )
        return [RequestRow.model_validate_json(line) for line in data.splitlines()]

    def partial(self, key: str) -> list[RequestRow]:
        """Rows of finished rounds of a cell that is not sealed. A line torn by a crash is dropped."""
        path = self._partial(key)
        if not path.is_file():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        rows = []
        for line in lines:
            try:
                rows.append(RequestRow.model_validate_json(line))
            except pydantic.ValidationError:
                break
        if len(rows) < len(lines) or (lines and not lines[-1].endswith(b"\n")):
            with _writing(path):
                write_atomic(path, _lines(rows))
        return rows

    def append_partial(self, key: str, rows: Sequence[RequestRow]) -> None:
        """Keep the rows of a finished round. Raises BadEnvironment when the disk is full."""
        path = self._partial(key)
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(_lines(rows))
                file.flush()
                os.fsync(file.fileno())

    def seal(self, record: CellRecord, rows: Sequence[RequestRow], logs: Mapping[str, str]) -> CellRecord:
        """Write a cell once and for all, with the sha256 of its rows.

        logs  file name -> text, kept beside the cell
        Raises BadEnvironment when the disk is full; then the cell is not sealed and its partial rows are
        kept.
        """
        target = self._cell(record.key)
        data = _lines(rows)
        record = record.model_copy(update={"rows_sha256": hashlib.sha256(data).hexdigest()})
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _writing(target):
                draft.mkdir(parents=True)
                write_synced(draft / "rows.jsonl", data)
                if record.reason:
                    write_synced(draft / "reason.txt", f"{record.reason}\n".encode())
                for name, text in logs.items():
                    (draft / "logs").mkdir(exist_ok=True)
                    write_synced(draft / "logs" / name, text.encode())
                write_synced(draft / "cell.json", _dump(record))
                draft.rename(target)  # fails when the cell exists: nothing is overwritten
                sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._partial(record.key).unlink(missing_ok=True)
        return record

    def set_aside(self, key: str) -> Path:
        """Move a sealed cell to `aside/`, so that its key can be measured again; returns the new place."""
        source = self._cell(key)
        aside = self.root / "aside"
        with _writing(source):
            aside.mkdir(exist_ok=True)
            number = 1
            while (target := aside / f"{source.name}.{number}").exists():
                number += 1
            source.rename(target)
        return target

    def run_folder(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    def write_run(self, run: RunRecord) -> None:
        """Write or, by the sweep that it belongs to, update a run's record."""
        folder = self.run_folder(run.run_id)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "run.json", _dump(run))

    def new_run_id(self, stamp: str, name: str) -> str:
        """A run id that is free: `<stamp>-<name>`, with a number where that is taken."""
        run_id, number = f"{stamp}-{name}", 1
        while self.run_folder(run_id).exists():
            number += 1
            run_id = f"{stamp}-{name}-{number}"
        return run_id

    def _cell(self, key: str) -> Path:
        return self.root / "cells" / key[:KEY_CHARS]

    def _partial(self, key: str) -> Path:
        return self.root / "partial" / f"{key[:KEY_CHARS]}.jsonl"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a message that says what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise BadEnvironment(
                f"the disk is full: {path} could not be written ({error.strerror}); sealed cells are safe",
                remedy="free some space and run the same command again: it goes on where it was",
            ) from error
        raise BadEnvironment(f"{path} could not be written: {error.strerror or error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path} is corrupt: {error}", remedy="move it away or give another folder") from error


def _validated(model: type[R], data: Any, path: Path) -> R:
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise from_validation(error, file=path) from None


def _dump(record: Record) -> bytes:
    return (json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def _lines(rows: Sequence[RequestRow]) -> bytes:
    return b"".join(json.dumps(row.model_dump(mode="json")).encode() + b"\n" for row in rows)
