"""Stands in for an engine inside a container: its options, `/ready`, `/server_info` and greedy answers.

Copied into a small image under the CPU engine's module name; standard library only. Variables make it fail:
DOUBLE=exit ends with code 3 at once, DOUBLE=never is never ready, DOUBLE=liar serves another budget.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE = os.environ.get("DOUBLE", "")
KEY = os.environ.get("DDTREE_API_KEY")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("arm", "builder", "model", "drafter", "host", "calibration"):
        parser.add_argument(f"--{name}")
    for name in ("budget", "topk", "port", "max-running", "context-length"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--allow-hybrid-unsafe", action="store_true")
    options = parser.parse_args()
    print("double: started", " ".join(sys.argv[1:]), flush=True)
    if MODE == "exit":
        print("double: cannot go on", flush=True)
        sys.exit(3)
    Handler.options = options
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    print("double: drained", flush=True)


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def do_GET(self) -> None:
        if self.path == "/ready":
            self._answer(503 if MODE == "never" else 200, {})
        elif self._refused():
            self._answer(401, {"error": "Unauthorized"})
        else:
            self._answer(200, self._info())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._refused():
            self._answer(401, {"error": "Unauthorized"})
        else:
            self._answer(200, {"output_ids": [1, 2, 3], "text": "abc", "meta_info": {}})

    def _refused(self) -> bool:
        return KEY is not None and self.headers.get("Authorization") != f"Bearer {KEY}"

    def _info(self) -> dict[str, Any]:
        options = self.options
        block: dict[str, Any] = {"engine": "reference", "arm": options.arm}
        block["budget"] = 7 if MODE == "liar" else options.budget
        block |= {"topk": options.topk, "builder": options.builder, "per_request_budget": True}
        block["allow_hybrid_unsafe"] = options.allow_hybrid_unsafe
        return {"version": "0", "max_running_requests": options.max_running, "ddtree": block}

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    main()
