"""Stands in for an engine inside a container: its options, `/ready`, `/server_info` and greedy answers.

Copied into a small image under the CPU engine's module name; standard library only. Variables make it fail:
DOUBLE=exit ends with code 3 at once, DOUBLE=never is never ready, DOUBLE=liar serves another budget;
DOUBLE_STEP_S slows every token down.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE = os.environ.get("DOUBLE", "")
STEP_S = float(os.environ.get("DOUBLE_STEP_S", "0"))
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
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._refused():
            self._answer(401, {"error": "Unauthorized"})
        elif self.path != "/generate":
            self._answer(200, {})
        else:
            self._generate(json.loads(data))

    def _generate(self, body: dict[str, Any]) -> None:
        """Tokens that follow from the prompt alone: the same for every arm; two a step where it drafts."""
        count = body["sampling_params"]["max_new_tokens"]
        seed = sum(str(body.get("text") or body.get("input_ids")).encode())
        output = [2 + (seed * 31 + place * 7) % 97 for place in range(count)]
        drafts = self.options.arm != "ar"
        steps = max(1, count // 2) if drafts else count
        meta: dict[str, Any] = {"completion_tokens": count, "prompt_tokens": 5, "cached_tokens": 0}
        meta["finish_reason"] = {"type": "length"}
        meta["ddtree"] = {"arm": self.options.arm, "tree_steps": steps, "tree_nodes": 32 * steps}
        if drafts:
            accepted = count - 1 - steps
            meta |= {"spec_verify_ct": steps, "spec_num_correct_drafts": accepted}
            meta |= {"spec_correct_drafts_histogram": [steps - accepted, accepted]}
        if not body.get("stream"):
            self._answer(200, {"output_ids": output, "text": "", "meta_info": meta})
            return
        self.send_response(200)
        self.end_headers()
        for end in range(1, count + 1):
            time.sleep(STEP_S)
            seen = meta if end == count else {"completion_tokens": end, "finish_reason": None}
            event = json.dumps({"output_ids": output[:end], "text": "", "meta_info": seen})
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _refused(self) -> bool:
        return KEY is not None and self.headers.get("Authorization") != f"Bearer {KEY}"

    def _info(self) -> dict[str, Any]:
        options = self.options
        block: dict[str, Any] = {"engine": "reference", "arm": options.arm}
        block |= {"model_sha256": "m", "drafter_sha256": "d", "dtype": "float32", "block": 16}
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
