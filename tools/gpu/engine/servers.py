"""Server processes and the requests to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from engine.arms import Arm
from engine.host import Context

START_LIMIT = 330
# The first request compiles: SGLang's tree kernels by nvcc, the kernels of a path without graphs by Triton.
FIRST_ANSWER = 120
TELLING = re.compile(
    r"^\S*(Error|Exception|Exit)\b|CUDA error|illegal memory|device-side assert|out of memory"
    r"|nvcc fatal|ptxas|Segmentation fault|Fatal Python error|ddtree plugin.*could not"
)

# A line that comes when weights and pools are there.
CAPTURING = re.compile(r"Capture target \w+ CUDA graph begin")


class Server:
    """One server process and the requests to it."""

    def __init__(self, context: Context, name: str, arm: Arm, port: int, argv: list[str]) -> None:
        self.name = name
        self.arm = arm
        self.url = f"http://127.0.0.1:{port}"
        self.log = context.raw / f"{name}.log"
        self.began = time.monotonic()
        self.ready_after: float | None = None
        # What it answered to its first request, when that was a refusal.
        self.refused: str | None = None
        self._file = self.log.open("w")
        self.process = subprocess.Popen(
            argv,
            env=context.environment(arm, name),
            # Not the repository's root, which Python would search first: its folder `kernels` has the name of
            # a library that transformers looks for.
            cwd=context.raw,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, limit: float) -> bool:
        """Whether it has generated a token; a process that answers /health may still be unable to."""
        deadline = time.monotonic() + limit
        refusals = 0
        while time.monotonic() < deadline and self.process.poll() is None and refusals < 3:
            try:
                if self.get("/health", timeout=3) is not None:
                    self.generate([5, 6, 7, 8], 4, timeout=FIRST_ANSWER)
                    self.ready_after = time.monotonic() - self.began
                    return True
            except urllib.error.HTTPError as error:
                # 503 while it starts; what else it answers does not change by asking again.
                refusals += error.code != 503
                self.refused = f"{error.code}: {error.read().decode(errors='replace')[:300]}"
            except (OSError, ValueError, http.client.HTTPException):
                pass
            time.sleep(1)
        return False

    def settle(self, limit: float) -> None:
        """Until it has taken its weights and pools, and goes on to what needs little memory; or has ended."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            if CAPTURING.search(self.log.read_text(errors="replace")):
                return
            time.sleep(0.5)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def why(self) -> str:
        """What its log and its answers say about a failure, short."""
        said = why(self.log.read_text(errors="replace"))
        return said if self.refused is None else f"answered {self.refused}\n{said}"

    def stop(self) -> None:
        if self._file.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self._file.close()
        time.sleep(1)  # the card's memory comes back a little later

    def get(self, path: str, timeout: float = 60) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout: float = 180) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read().decode()
        except (ConnectionError, http.client.HTTPException):
            # Whoever hangs up is about to end: waiting for that spares what would be asked of it next.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=15)
            raise
        return json.loads(text) if text.startswith(("{", "[")) else text

    def flush(self) -> None:
        """Empty the prefix cache; refused while a request is still being cleaned up."""
        for _ in range(50):
            try:
                self.post("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                time.sleep(0.2)
        raise RuntimeError("the prefix cache cannot be flushed")

    def generate(
        self, ids: list[int], tokens: int, *, temperature: float = 0.0, timeout: float = 180, **more: Any
    ) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        sampling |= more.pop("sampling", {})
        return self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **more}, timeout)


def why(log: str, most: int = 8, tail: int = 1200) -> str:
    """The last telling lines of a log, each once, and its end."""
    lines = [line.strip()[:300] for line in log.splitlines() if TELLING.search(line.strip())]
    told = list(dict.fromkeys(reversed(lines)))[:most][::-1]
    return "\n".join([*told, "-- the log's end", log[-tail:]])


def cause(log: str) -> str:
    """One line that two failures for the same reason share."""
    lines = [line.strip()[:200] for line in log.splitlines() if TELLING.search(line.strip())]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", lines[-1]) if lines else "no error in the log"
