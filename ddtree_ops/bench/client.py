"""The load client: one streaming `/generate` request, timed chunk by chunk.

A chunk is what one read from the socket brought; tokens that arrive together have one arrival time. Requests
are never retried, since a retried request is a wrong sample. Acceptance comes from the request's own
`meta_info.spec_*` fields, never from the server's running average.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

READ_BUFFER = 10 * 2**20
CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0
ERROR_CHARS = 300


@dataclass(frozen=True)
class Answer:
    """What came back for one request. Times are seconds after sending but `sent_at`, which is Unix time.

    error  null when the stream came to its proper end
    """

    sent_at: float
    error: str | None = None
    e2e_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    meta_info: Mapping[str, Any] = field(default_factory=dict)


def new_session(connections: int, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session for `connections` concurrent streams, with buffers for large events and no cookie or proxy
    magic.

    headers  of every request, such as an API key
    """
    return aiohttp.ClientSession(
        # Idle connections go before the server (uvicorn: 5 s) closes them under a request.
        connector=aiohttp.TCPConnector(limit=max(connections, 1) + 4, keepalive_timeout=KEEP_ALIVE_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER,
        trust_env=False,
    )


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.perf_counter,
    wall: Callable[[], float] = time.time,
) -> Answer:
    """Send one `/generate` request as a stream and time it. Failures are in the answer, not raised.

    url      the service's base address
    request  the JSON body without `stream`
    """
    stream = AnswerStream()
    sent_at, start = wall(), clock()
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    error: str | None
    try:
        async with session.post(
            f"{url}/generate", json={**request, "stream": True}, timeout=timeout
        ) as answer:
            if answer.status != 200:
                error = f"HTTP {answer.status}: {(await answer.text())[:ERROR_CHARS]}"
            else:
                async for chunk in answer.content.iter_any():
                    stream.feed(chunk, clock() - start)
                error = stream.problem()
    except TimeoutError:
        error = f"timed out after {timeout_s:g} s with {len(stream.output_ids)} tokens"
    except aiohttp.ClientError as problem:
        error = f"{type(problem).__name__}: {problem} after {len(stream.output_ids)} tokens"
    except BadStream as problem:
        error = str(problem)
    return Answer(
        sent_at=sent_at,
        error=error,
        e2e_s=clock() - start,
        chunk_s=stream.chunk_s,
        chunk_tokens=stream.chunk_tokens,
        output_ids=stream.output_ids,
        meta_info=stream.meta_info,
    )


async def post_json(
    session: aiohttp.ClientSession, url: str, path: str, body: Mapping[str, Any], *, timeout_s: float
) -> dict[str, Any]:
    """One untimed request; raises aiohttp.ClientError, TimeoutError or ValueError."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    async with session.post(f"{url}{path}", json=body, timeout=timeout) as answer:
        if answer.status != 200:
            raise ValueError(f"{path}: HTTP {answer.status}: {(await answer.text())[:ERROR_CHARS]}")
        data = await answer.json(content_type=None)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: found {type(data).__name__}, allowed: a JSON object")
    return data


class BadStream(Exception):
    """The server sent something that is not its protocol."""


class _Lines:
    """Cuts a byte stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerStream:
    """One answer as it arrives."""

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.output_ids: list[int] = []
        self.meta_info: dict[str, Any] = {}
        self._lines = _Lines()
        self._done = False

    def feed(self, chunk: bytes, at: float) -> None:
        before = len(self.output_ids)
        for data in self._lines.feed(chunk):
            if data == b"[DONE]":
                self._done = True
            else:
                self._event(data)
        if len(self.output_ids) > before:
            self.chunk_s.append(at)
            self.chunk_tokens.append(len(self.output_ids) - before)

    def problem(self) -> str | None:
        """Why the stream is no full answer, if it is none."""
        if not self._done or not self.meta_info.get("finish_reason"):
            return f"the stream broke off after {len(self.output_ids)} tokens"
        reason = self.meta_info["finish_reason"]
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind == "abort":
            return f"the server aborted the request: {str(reason)[:ERROR_CHARS]}"
        return None

    def _event(self, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            raise BadStream(f"an event is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise BadStream(f"an event is no object: {data[:80]!r}")
        if "error" in event:
            raise BadStream(f"the server reported: {json.dumps(event['error'])[:ERROR_CHARS]}")
        self.meta_info = event.get("meta_info") or {}
        self._take(event.get("output_ids") or [], self.meta_info.get("completion_tokens"))

    def _take(self, ids: list[int], total: int | None) -> None:
        """Add an event's ids, which are all so far (the server's default) or only the new ones.

        `completion_tokens` counts all so far and tells which.
        """
        have = len(self.output_ids)
        if total is None:
            raise BadStream("an event has no meta_info.completion_tokens")
        if len(ids) == total and ids[:have] == self.output_ids:
            self.output_ids = list(ids)
        elif len(ids) == total - have:
            self.output_ids.extend(ids)
        else:
            raise BadStream(
                f"output_ids do not add up: {have} so far, {len(ids)} in an event, completion_tokens {total}"
            )
