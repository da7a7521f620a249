"""An engine that can do what a real one cannot be made to: fail, lie, stop in the middle, say nothing."""

from __future__ import annotations

import json
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.ssh import SshTarget

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers from the server's table: `METHOD path` without the version, by its beginning."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        path = "/" + path.split("/", 2)[2] if path.startswith("/v") and path[2].isdigit() else path
        self.read_body()
        self.server.seen.append(f"{self.command} {path}")
        if path == "/version":
            return self.json(200, {"ApiVersion": "1.41", "Version": "fake"})
        for start, answer in self.server.answers.items():
            if f"{self.command} {path}".startswith(start):
                return answer(self)
        return self.json(404, {"message": f"No such thing: {path}"})

    do_GET = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815 - names of the base class

    def read_body(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while length := int(self.rfile.readline(), 16):
                self.rfile.read(length + 2)
            self.rfile.readline()
        else:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def json(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def stream(self, *chunks: bytes, end: bool = True) -> None:
        """A chunked answer; without its end it is cut off."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if end:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def events(self, *events: dict[str, Any], end: bool = True) -> None:
        self.stream(*(json.dumps(event).encode() + b"\r\n" for event in events), end=end)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FakeServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 50

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), Handler)
        self.answers: dict[str, Answer] = {}
        self.seen: list[str] = []
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is what some tests are about."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with (
        tempfile.TemporaryDirectory(prefix="ddt-") as folder,
        FakeServer(Path(folder) / "docker.sock") as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(server: FakeServer, tmp_path: Path) -> Iterator[Engine]:
    target = SshTarget("localhost", local=True, docker_socket=str(server.server_address))
    with HostLink("gpu-a", target, log_folder=tmp_path / "logs", probe_s=1) as link:
        yield link.engine()
