"""Services as processes of this machine, which never outlive their sweep.

Each process leads a session of its own, so that Ctrl-C in the terminal reaches the sweep only and the sweep
decides what to stop; `stop` signals the whole group. The kernel kills the process when the sweep dies without
a chance to clean up (PR_SET_PDEATHSIG), so that a crash leaves no orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ddtree_ops.errors import BadEnvironment
from ddtree_ops.services.base import ServiceSpec

LOOPBACK = "127.0.0.1"
STOP_GRACE_S = 10.0
PR_SET_PDEATHSIG = 1
TAIL_BYTES = 16384


class LocalService:
    """A server process on loopback with its output in a file."""

    def __init__(
        self,
        spec: ServiceSpec,
        log_path: Path,
        *,
        grace_s: float = STOP_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self._log_path = log_path
        self._grace_s = grace_s
        self._clock = clock
        self._sleep = sleep
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._stopped = False

    @property
    def url(self) -> str:
        if self._port is None:
            raise RuntimeError(f"service {self.spec.name} was not started")
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def log_path(self) -> Path | None:
        return self._log_path

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process on a free port. Raises BadEnvironment when its program cannot be run.

        Call it from the main thread: the death signal comes when the *thread* that started the process ends.
        """
        self._port = free_port()
        argv = [*self.spec.argv, "--host", LOOPBACK, "--port", str(self._port)]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_path.chmod(0o600)
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.spec.env},
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
            except OSError as error:
                raise BadEnvironment(
                    f"service {self.spec.label}: cannot run {argv[0]}: {error.strerror}"
                ) from error

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def log_tail(self, lines: int = 20) -> str:
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after the grace period; what it left running goes with it."""
        if self._process is None or self._stopped:
            return
        self._stopped = True
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = self._clock() + self._grace_s
            while self._process.poll() is None and self._clock() < deadline:
                self._sleep(0.02)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalLauncher:
    """Starts services with their logs as `FOLDER/<service>.log`, further replicas' as `<service>-<N>.log`."""

    def __init__(self, log_folder: Path, *, grace_s: float = STOP_GRACE_S) -> None:
        self._log_folder = log_folder
        self._grace_s = grace_s

    def create(self, spec: ServiceSpec) -> LocalService:
        return LocalService(spec, self._log_folder / f"{spec.label}.log", grace_s=self._grace_s)


_handed_out: set[int] = set()


def free_port() -> int:
    """A port that was free a moment ago and that this process was not given before."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if port not in _handed_out:
            _handed_out.add(port)
            return port


def require_free_port(port: int, host: str = LOOPBACK) -> None:
    """Raise BadEnvironment when something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadEnvironment(
                f"port {port} on {host} cannot be used: {error.strerror}",
                remedy="stop what listens there, or choose another port with --port",
            ) from error


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before exec, so that the kernel kills it together with its parent (Linux only)."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def set_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return set_death_signal
