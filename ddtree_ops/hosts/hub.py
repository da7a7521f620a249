"""May this token fetch this revision from the Hub? Asked before anything is downloaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import httpx

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 10.0


class Access(StrEnum):
    OK = "ok"
    GATED = "gated"
    MISSING = "missing"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Answer:
    """What the Hub says of a revision; `commit` where it told."""

    access: Access
    detail: str
    commit: str | None = None


def probe_revision(
    repo: str,
    revision: str,
    *,
    token: str | None,
    endpoint: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask for the headers of config.json: a gated model shows everyone its list of files, not its files."""
    base = (endpoint or os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.head(
            f"{base}/{repo}/resolve/{revision}/config.json", headers=headers, timeout=timeout_s
        )
    except httpx.HTTPError as error:
        return Answer(Access.UNREACHABLE, f"{base}: {type(error).__name__}")
    code = answer.headers.get("X-Error-Code", "")
    if answer.status_code in {200, 302, 307}:
        return Answer(Access.OK, "may be fetched", answer.headers.get("X-Repo-Commit"))
    if code in {"RepoNotFound", "RevisionNotFound", "EntryNotFound"} or answer.status_code == 404:
        return Answer(Access.MISSING, f"the Hub answers {answer.status_code} {code}".strip())
    if answer.status_code in {401, 403}:
        return Answer(Access.GATED, f"the Hub answers {answer.status_code} {code}".strip())
    return Answer(Access.UNREACHABLE, f"the Hub answers {answer.status_code}")
