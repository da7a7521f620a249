"""A Hub on loopback: one model, open or gated, whose weights break off in the middle when told to."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COMMIT = "c" * 40
REPO = "lab/model"


@dataclass
class Hub:
    """What the server holds and what it was asked."""

    files: dict[str, bytes]
    token: str | None = None
    breaks: int = 0
    size: int | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.asked.append((self.command, path, self.headers.get("Range")))
            if path.startswith(f"/api/models/{REPO}"):
                self._send(200, self._listing(path), body=body)
                return
            prefix = f"/{REPO}/resolve/"
            name = path.removeprefix(prefix).partition("/")[2]
            if not path.startswith(prefix) or name not in hub.files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body=body)
            else:
                self._file(name, body=body)

        def _listing(self, path: str) -> bytes:
            entries = [
                {
                    "rfilename": name,
                    "path": name,
                    "type": "file",
                    "size": hub.size or len(data),
                    "oid": etag(data),
                }
                for name, data in hub.files.items()
            ]
            if "/tree/" in path:
                return json.dumps(entries).encode()
            return json.dumps({"id": REPO, "sha": COMMIT, "siblings": entries, "private": False}).encode()

        def _file(self, name: str, *, body: bool) -> None:
            data = hub.files[name]
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start = 0
            if self.headers.get("Range"):
                start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(
                206 if start else 200, data[start:], headers, body=body, cut=name.endswith("safetensors")
            )

        def _send(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            *,
            body: bool,
            cut: bool = False,
        ) -> None:
            self.send_response(status)
            kind = "application/json" if headers is None else "application/octet-stream"
            for key, value in {
                "Content-Length": str(len(data)),
                "Content-Type": kind,
                **(headers or {}),
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if body and cut and hub.breaks > 0:
                hub.breaks -= 1
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            elif body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
