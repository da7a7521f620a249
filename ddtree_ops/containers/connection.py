"""The link to one host: its engine and its services' ports, through one ssh that is made again after a break.

    with HostLink("gpu-a", SshTarget.of(host, ssh), log_folder=folder) as link:
        link.engine().ours("lab")
        link.forward("127.0.0.1", 30000)   # http://127.0.0.1:NNNN on this machine

The user that ssh logs in as needs access to the engine's socket: root, or a member of the group docker.
Forwarding happens as that user; `become` has no part in it.
"""

from __future__ import annotations

import os
import socket as sockets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import tenacity

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure, HostUnreachable
from ddtree_ops.containers.ssh import LOOPBACK, SshSession, SshTarget
from ddtree_ops.services.local import free_port

__all__ = ["DockerFailure", "HostLink", "HostUnreachable", "SshTarget"]

#: How long a connection is tried again before its host counts as unreachable.
PATIENCE_S = 15.0
PROBE_S = 5.0
TRIES_FOR_A_PORT = 5
#: Paths of Unix sockets end at 104 to 108 bytes, and ssh adds a suffix of its own.
LONGEST_FOLDER = 70
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}


class HostLink:
    """Connects at first use and again at the next use after a break. Safe for several threads.

    name        the host's, for messages
    log_folder  where containers' logs go before they are removed
    patience_s  how long a broken or first connection is tried; wrong keys are not tried again
    """

    def __init__(
        self,
        name: str,
        target: SshTarget,
        *,
        log_folder: Path | None = None,
        patience_s: float = PATIENCE_S,
        probe_s: float = PROBE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.target = target
        self._patience_s = patience_s
        self._probe_s = probe_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.RLock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._session: SshSession | None = None
        self._ports: dict[tuple[str, int], int] = {}
        self._failure: tuple[float, Exception] | None = None
        self._closed = False
        self._engine = Engine(self, log_folder=log_folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def engine(self) -> Engine:
        return self._engine

    @property
    def closed(self) -> bool:
        """Whether it was closed, for good."""
        return self._closed

    def connect(self, *, patience_s: float | None = None) -> None:
        """Connect now instead of at first use. Raises HostUnreachable, BadEnvironment.

        patience_s  how long it is tried, 0 for once; null for as long as ever
        """
        if not self.target.local:
            self._connected(patience_s)

    def forward(self, address: str, port: int) -> str:
        """The base URL on this machine of what listens on address:port of the host.

        The same for the life of the link, also after a reconnect. Raises HostUnreachable, BadEnvironment.
        """
        address = WILDCARDS.get(address, address)
        if self.target.local:
            return f"http://{_bracketed(address)}:{port}"
        with self._lock:
            session = self._connected()
            for _ in range(TRIES_FOR_A_PORT):
                if (address, port) in self._ports:
                    break
                local = free_port()
                if session.forward(_forward(local, address, port)):
                    self._ports[address, port] = local
                elif not session.echoes(self._probe_s):
                    raise session.lost()
            else:
                raise HostUnreachable(f"{self.name}: ssh would not forward port {port}")
            return f"http://{LOOPBACK}:{self._ports[address, port]}"

    def alive(self) -> bool:
        """Whether the host answers now, within a few seconds. Never connects."""
        if self.target.local:
            return True
        session = self._session
        return session is not None and not session.ended() and session.echoes(self._probe_s)

    def run(self, command: str, *, timeout_s: float = 30.0) -> str | None:
        """What a shell command printed on the host; null when it failed. For questions, not for changes."""
        if not self.target.local:
            return self._connected().run(command, timeout_s)
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                ["sh", "-c", command], capture_output=True, text=True, timeout=timeout_s, check=True
            )
            return done.stdout
        return None

    def stream(self, command: str) -> subprocess.Popen[str]:
        """A shell command on the host that goes on until it ends or is killed here; its lines as they come.

        What it says on standard error is among them. Raises HostUnreachable.
        """
        argv = ["sh", "-c", command] if self.target.local else self._connected().stream_argv(command)
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def close(self) -> None:
        """End ssh and remove its sockets; harmless when repeated. A closed link does not connect again."""
        self._closed = True  # ends the tries of a thread that is connecting, which holds the lock
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    # What an engine needs of its wire.

    def socket(self) -> Path:
        return Path(self.target.docker_socket) if self.target.local else self._connected().socket

    def require(self) -> None:
        if self.target.local or self.alive():
            return
        session = self._session
        if session is None:
            raise HostUnreachable(f"{self.name}: there is no connection")
        raise session.lost()

    def trouble(self) -> DockerFailure | None:
        """Why the engine's socket does not answer: it is not there, not ours to open, or nobody listens."""
        path = self.target.docker_socket
        test = f"[ -S '{path}' ] || {{ echo missing; exit; }}; [ -w '{path}' ] && echo there || echo denied"
        found = (self.run(test, timeout_s=self._probe_s * 2) or "").strip()
        if found == "denied":
            return DockerFailure(
                f"{self.name}: permission denied on the engine's socket {path}",
                remedy="connect as root, or add the user to the group docker ('usermod -aG docker USER') "
                "and connect again",
            )
        if found == "missing" or (found == "there" and not self._answers()):
            return DockerFailure(
                f"{self.name}: the Docker engine is not running: "
                + (f"there is no socket {path}" if found == "missing" else f"nobody answers on {path}"),
                remedy="'systemctl start docker' on the host; 'journalctl -u docker' says why it ended",
            )
        return None

    def _answers(self) -> bool:
        """Whether the engine's socket takes a connection and keeps it."""
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(self._probe_s)
            try:
                probe.connect(str(self.socket()))
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return bool(probe.recv(1))
            except OSError:
                return False

    def _connected(self, patience_s: float | None = None) -> SshSession:
        asked = self._clock()
        with self._lock:
            if self._closed:
                raise HostUnreachable(f"{self.name}: the link is closed")
            if self._session is not None and not self._session.ended():
                return self._session
            if self._failure is not None and self._failure[0] > asked:
                raise self._failure[1]  # somebody else tried while we waited
            try:
                self._session = self._open(self._patience_s if patience_s is None else patience_s)
            except Exception as error:
                self._failure = (self._clock(), error)
                raise
            return self._session

    def _open(self, patience_s: float) -> SshSession:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._folder is None:
            self._folder = _short_folder()
        folder = Path(self._folder.name)
        forwards = [_forward(local, *remote) for remote, local in self._ports.items()]
        trying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(patience_s),
            wait=tenacity.wait_exponential(multiplier=0.25, max=2),
            retry=tenacity.retry_if_exception(lambda error: not self._closed and worth_trying(error)),
            sleep=self._sleep,
            reraise=True,
        )
        return trying(SshSession.open, self.name, self.target, folder, forwards)


def worth_trying(error: BaseException) -> bool:
    """Whether a host may answer later, as one that boots does. A wrong key will be wrong in a second."""
    final = ("host key", "IDENTIFICATION", "Permission denied", "Could not resolve")
    return isinstance(error, HostUnreachable) and not any(word in error.message for word in final)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="ddtree-")
    if len(os.fsencode(folder.name)) <= LONGEST_FOLDER:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="ddtree-", dir="/tmp")


def _forward(local: int, address: str, port: int) -> str:
    return f"{LOOPBACK}:{local}:{_bracketed(address)}:{port}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
