"""Docker's SDK with a deadline for whole calls. Imported only where an engine is really talked to.

The SDK's own timeout is for one read, and it switches that off for streams; a call could then wait for ever.
Here a timer ends the connection itself, whatever is waiting on it.
"""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool

#: Reads of plain answers; only a net below the deadline, which cuts first.
READ_MARGIN_S = 30.0
#: The prefix under which the SDK sends everything that goes over a socket.
SOCKET_SCHEME = "http+docker://"


class Deadline:
    """Ends the connections of one call when its time is up. `seconds` null never does.

    expired  the time was up before the call was over
    broken   an answer ended before its end, whatever the SDK made of that
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.expired = False
        self.broken = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer: threading.Timer | None = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connection)
            if self.expired:
                _cut(connection)

    def close(self) -> None:
        """The call is over: nothing may be left waiting on a connection, not even by an unfinished stream."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            for connection in self._sockets:
                _cut(connection)

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            for connection in self._sockets:
                _cut(connection)


def server_version(path: Path, deadline: Deadline) -> str:
    """The newest API that the engine speaks."""
    client = open_client(path, DEFAULT_DOCKER_API_VERSION, deadline)
    try:
        return str(client.version(api_version=False)["ApiVersion"])
    finally:
        client.close()


def open_client(path: Path, version: str, deadline: Deadline) -> docker.APIClient:
    """A client for one call over a Unix socket; sends nothing yet."""
    seconds = None if deadline.seconds is None else deadline.seconds + READ_MARGIN_S
    client = docker.APIClient(base_url=f"unix://{path}", version=version, timeout=seconds)  # type: ignore[arg-type]
    client.mount(SOCKET_SCHEME, _Adapter(f"http+unix://{path}", seconds, deadline))
    client.headers["Connection"] = "close"  # a connection that was kept would be dead after a reconnect
    return client


class _Adapter(UnixHTTPAdapter):
    def __init__(self, url: str, timeout: float | None, deadline: Deadline) -> None:
        super().__init__(url, timeout=timeout)  # type: ignore[arg-type]
        self._deadline = deadline

    def get_connection(self, url: bytes | str, proxies: Any = None) -> UnixHTTPConnectionPool:
        return _Pool(str(url), self.socket_path, self.timeout, self._deadline)


class _Pool(UnixHTTPConnectionPool):
    def __init__(self, base_url: str, socket_path: str, timeout: int, deadline: Deadline) -> None:
        super().__init__(base_url, socket_path, timeout)
        self._deadline = deadline

    def _new_conn(self) -> _Connection:  # type: ignore[override]
        return _Connection(self.base_url, self.socket_path, self._deadline)


class _Connection(UnixHTTPConnection):
    def __init__(self, base_url: str, unix_socket: str, deadline: Deadline) -> None:
        super().__init__(base_url, unix_socket, timeout=None)  # type: ignore[arg-type]
        self._deadline = deadline
        self.response_class = partial(_Answer, deadline)  # type: ignore[assignment]

    def connect(self) -> None:
        super().connect()
        assert self.sock is not None
        self._deadline.watch(self.sock)


class _Answer(http.client.HTTPResponse):
    """Remembers that it broke off: of a log that is followed, the SDK takes that for the end.

    Reads its header and not a byte more: after an upgrade the SDK reads from the socket itself, where output
    that came with the header, as it does over a slow network, would be missing.
    """

    def __init__(self, deadline: Deadline, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._deadline = deadline
        self.fp.close()
        self.fp = sock.makefile("rb", 1)

    def read(self, amt: int | None = None) -> bytes:
        try:
            return super().read(amt)
        except (http.client.HTTPException, OSError):
            self._deadline.broken = True
            raise


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
