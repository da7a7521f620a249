"""Bounded load on a gateway: what became of every request, and which replica it was on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

#: Where smg says which replica an answer comes from.
ROUTED = "x-smg-routed-worker-id"
TOKENS = 10
TIMEOUT_S = 120.0
AT_ONCE = 6


@dataclass
class Request:
    """worker  is known once an answer began: the replica that it came from."""

    number: int
    stream: bool
    worker: str | None = None
    whole: bool = False
    error: str = ""


class Load:
    """Requests until told to stop, so many at once, every second one streamed."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.requests: list[Request] = []
        self._url = url
        self._headers = dict(headers)
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def streams_on(self, worker: str) -> set[int]:
        """Streams that began on the replica and have not ended."""
        with self._lock:
            return {one.number for one in self.requests if one.stream and open_on(one, worker)}

    @property
    def lost(self) -> set[int]:
        return {one.number for one in self.requests if not one.whole}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leaves when every request has ended, one way or the other."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [pool.submit(self._work) for _ in range(AT_ONCE)]
            try:
                yield
            finally:
                self._stop.set()
            for job in jobs:
                job.result()

    def _work(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, headers=self._headers, trust_env=False) as http:
            while not self._stop.is_set():
                with self._lock:
                    request = Request(len(self.requests), stream=len(self.requests) % 2 == 0)
                    self.requests.append(request)
                try:
                    self._ask(http, request)
                except httpx.HTTPError as error:
                    request.error = f"{type(error).__name__}: {error}"

    def _ask(self, http: httpx.Client, request: Request) -> None:
        body = {
            "text": f"def f{request.number}(a, b):\n    return a +",
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            "stream": request.stream,
        }
        with http.stream("POST", f"{self._url}/generate", json=body) as answer:
            with self._lock:
                request.worker = answer.headers.get(ROUTED)
            if answer.status_code != 200:
                answer.read()
                request.error = f"{answer.status_code}: {answer.text[:200]}"
                return
            lines = [line for line in answer.iter_lines() if line]
        with self._lock:
            request.whole, request.error = verdict(lines, request.stream)


def open_on(request: Request, worker: str) -> bool:
    return request.worker == worker and not request.whole and not request.error


def verdict(lines: list[str], stream: bool) -> tuple[bool, str]:
    """Whether an answer is whole: all tokens, and for a stream the end mark."""
    if stream:
        if lines[-1:] != ["data: [DONE]"]:
            return False, f"ends with {lines[-1:]}"
        lines = [lines[-2].removeprefix("data: ")]
    answer = json.loads(lines[0])
    tokens = answer.get("meta_info", {}).get("completion_tokens")
    return tokens == TOKENS, "" if tokens == TOKENS else f"found {tokens} tokens: {lines[0][:200]}"
