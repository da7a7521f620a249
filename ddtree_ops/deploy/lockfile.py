"""What `deploy` found out once and keeps beside cluster.yaml: commits of branches, and the cards of hosts.

`cluster.yaml` has `cluster.lock.json`: commit it with the file. A lock on a file of its own keeps two
`deploy` commands on one cluster apart (on one operator's machine).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import filelock
import pydantic

from ddtree_ops.deploy.layout import Card
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.files import write_json
from ddtree_ops.schemas.sweep import StrictModel


class LockedCard(StrictModel):
    uuid: str
    bus: str
    numa: int


class LockFile(StrictModel):
    """revisions: commits by `repo@branch`; cards: by host, as they were at the last `up`.

    turn  how often services have moved on to the next card
    """

    schema_version: Literal[1] = pydantic.Field(1, alias="schema")
    revisions: dict[str, str] = pydantic.Field({})
    cards: dict[str, list[LockedCard]] = pydantic.Field({})
    turn: Annotated[int, pydantic.Field(ge=0)] = 0

    def cards_of(self, host: str) -> tuple[Card, ...]:
        return tuple(Card(card.uuid, card.bus, card.numa) for card in self.cards.get(host, ()))

    def with_cards(self, cards: Mapping[str, Sequence[Card]]) -> LockFile:
        found = {host: [LockedCard(**vars(card)) for card in some] for host, some in cards.items()}
        return self.model_copy(update={"cards": {**self.cards, **found}})

    def with_revisions(self, revisions: Mapping[str, str]) -> LockFile:
        return self.model_copy(update={"revisions": {**self.revisions, **revisions}})


def lock_path(file: Path) -> Path:
    """Of the lock file that belongs to a cluster.yaml."""
    return file.with_name(f"{file.stem}.lock.json")


def read_lock(file: Path) -> LockFile:
    """What is kept for a cluster.yaml; empty where nothing is. Raises BadInput for a broken file."""
    path = lock_path(file)
    try:
        return LockFile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return LockFile()
    except (OSError, UnicodeDecodeError, pydantic.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(
            f"{path}: cannot be read: {reason}", remedy="remove it: `ddtree deploy up` makes it anew"
        ) from error


def write_lock(file: Path, lock: LockFile) -> None:
    """Keep it, unless it says the same already. Raises BadEnvironment."""
    if read_lock(file) != lock:
        write_json(lock_path(file), lock.model_dump(mode="json", by_alias=True))


@contextmanager
def exclusively(file: Path) -> Iterator[None]:
    """Nobody else deploys this cluster.yaml meanwhile. Raises BadEnvironment at once when somebody does."""
    path = file.with_name(f".{file.stem}.deploy.lock")
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise BadEnvironment(
            f"{file}: another `ddtree deploy` works on this cluster",
            remedy="wait until it ends; `ddtree deploy status` may run meanwhile",
        ) from None
    except OSError as error:
        raise BadEnvironment(f"{path}: cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
