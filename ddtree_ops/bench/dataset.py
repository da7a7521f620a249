"""Prompts: a JSONL file, frozen by the sha256 of what is used of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ddtree_ops.errors import BadInput
from ddtree_ops.services.checkpoints import pair_path

PAIR = "pair"
PAIR_CALIBRATION = "pair-calibration"
#: Names of shipped prompts and their files; the two sets have no prompt in common.
SHIPPED = {PAIR: "prompts.jsonl", PAIR_CALIBRATION: "calibration-prompts.jsonl"}
ALLOWED = 'a JSON object {"id": str, "text": str} or {"id": str, "input_ids": [int, ...]} a line'


@dataclass(frozen=True)
class Prompt:
    """One prompt, as text or as token ids. `id` pairs its requests over arms."""

    id: str
    text: str | None = None
    input_ids: tuple[int, ...] | None = None

    def request(self) -> dict[str, Any]:
        """The prompt part of a `/generate` request."""
        if self.input_ids is not None:
            return {"input_ids": list(self.input_ids)}
        return {"text": self.text}

    def request_key(self) -> str | tuple[int, ...]:
        """What makes two prompts the same whatever their ids."""
        return self.text if self.text is not None else self.input_ids or ()


@dataclass(frozen=True)
class Dataset:
    """The prompts of a sweep, in order, with their hash."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def load_dataset(name: str, limit: int | None = None) -> Dataset:
    """Read the first `limit` prompts of shipped ones (`pair`, `pair-calibration`) or of a JSONL file.

    Raises BadInput naming file:line for anything that is not a prompt.
    """
    path = pair_path() / SHIPPED[name] if name in SHIPPED else Path(name)
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        if limit is not None and len(prompts) == limit:
            break
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in seen:
            raise BadInput(f"{path}:{number}: id {prompt.id!r} is taken by line {seen[prompt.id]}")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: no prompts", remedy=f"give {ALLOWED}")
    if limit is not None and len(prompts) < limit:
        raise BadInput(f"{path}: found {len(prompts)} prompts, {limit} were asked for")
    return Dataset(name if name in SHIPPED else path.name, tuple(prompts), _sha256(prompts))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BadInput(f"dataset: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"dataset: {path} is not UTF-8 text: {error.reason}") from error


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON ({error})", remedy=f"allowed is {ALLOWED}") from error
    if not isinstance(entry, Mapping):
        raise BadInput(f"{where}: found {type(entry).__name__}, allowed: {ALLOWED}")
    identity, text, ids = entry.get("id"), entry.get("text"), entry.get("input_ids")
    if not isinstance(identity, str) or not identity:
        raise BadInput(f"{where}: id: found {identity!r}, allowed: a string")
    if (text is None) == (ids is None):
        raise BadInput(f"{where}: needs one of text and input_ids")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise BadInput(f"{where}: text: found {text!r}, allowed: a string that is not empty")
        return Prompt(identity, text=text)
    if not _is_token_list(ids):
        raise BadInput(f"{where}: input_ids: allowed: a list of whole numbers >= 0 that is not empty")
    return Prompt(identity, input_ids=tuple(ids))


def _is_token_list(ids: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(ids, list)
        and bool(ids)
        and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids)
    )


def _sha256(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        entry = {"id": prompt.id, **prompt.request()}
        digest.update(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()
