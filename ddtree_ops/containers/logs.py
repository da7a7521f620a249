"""What a container said: whole lines, without secrets, in files that only their owner reads."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddtree_ops.containers.found import Found
from ddtree_ops.redact import redact_text

#: A longer line is passed on in pieces: a binary blob may not fill the memory.
LONGEST_LINE = 1 << 20


def redacted_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks as lines: a secret that was cut in two is whole again when it is looked for."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield _redacted(line) + b"\n"
        if len(rest) > LONGEST_LINE:
            yield _redacted(rest)
            rest = b""
    if rest:
        yield _redacted(rest) + b"\n"


def tail_text(lines: Iterable[bytes], count: int) -> str:
    kept = deque(lines, maxlen=count)
    return b"".join(kept).decode(errors="replace").rstrip("\n")


def write_dump(folder: Path, found: Found, lines: Iterable[bytes]) -> Path:
    """Write a container's log into `FOLDER/NAME-ID-TIME.log` (0600) and return that.

    A first line says what became of the container. What was written before an error stays.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    file = folder / f"{found.name}-{found.id[:12]}-{stamp}.log"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(f"# {found.name} ({found.image}): {found.outcome}\n".encode())
        for line in lines:
            stream.write(line)
    return file


def _redacted(line: bytes) -> bytes:
    return redact_text(line.decode(errors="replace")).encode()
