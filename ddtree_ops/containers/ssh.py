"""One ssh process to one host: it forwards a Unix socket and ports, and dies with us.

ssh runs `cat` on the host with pipes to here. What is written comes back, which proves in one round trip that
the whole way works; and when this process dies in whatever way, the pipe closes and ssh ends. Host keys are
always checked and nothing is ever asked: whatever the user's own configuration says, our options come first.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddtree_ops.containers.failures import HostUnreachable
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.hosts.inventory import Host
from ddtree_ops.hosts.runner import SshOptions

DOCKER_SOCKET = "/var/run/docker.sock"
LOOPBACK = "127.0.0.1"
#: For keys and a login shell, once the host has answered.
LOGIN_S = 20.0
#: Until ssh is killed that does not end when told to.
END_S = 3.0
#: Ansible's variables with further options of ssh, in the order in which Ansible itself gives them.
OPTION_VARIABLES = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")


@dataclass(frozen=True)
class SshTarget:
    """How a host is reached; `local` means not at all by ssh, its engine is this machine's.

    user, port, private_key, known_hosts  null: whatever ssh takes by itself
    options        more arguments of ssh, after ours, which win
    keepalive_s    the host is asked so often; after `keepalive_count` questions without an answer ssh ends
    docker_socket  on the host
    """

    address: str
    port: int | None = None
    user: str | None = None
    private_key: Path | None = None
    known_hosts: Path | None = None
    connect_timeout_s: int = 10
    docker_socket: str = DOCKER_SOCKET
    options: tuple[str, ...] = ()
    keepalive_s: int = 5
    keepalive_count: int = 4
    local: bool = False

    @classmethod
    def of(cls, host: Host, ssh: SshOptions, *, docker_socket: str = DOCKER_SOCKET) -> SshTarget:
        """From a host's Ansible variables, so that both reach it in the same way."""
        given = host.variables
        key = given.get("ansible_ssh_private_key_file") or ssh.private_key
        options = [word for name in OPTION_VARIABLES for word in shlex.split(str(given.get(name, "")))]
        user, port = (
            given.get(f"ansible_{name}") or given.get(f"ansible_ssh_{name}") for name in ("user", "port")
        )
        return cls(
            address=host.address,
            port=int(port) if port else None,
            user=str(user) if user else None,
            private_key=Path(key).expanduser() if key else None,
            known_hosts=ssh.known_hosts.expanduser() if ssh.known_hosts else None,
            connect_timeout_s=ssh.connect_timeout_s,
            docker_socket=docker_socket,
            options=tuple(options),
            local=given.get("ansible_connection") == "local",
        )

    def arguments(self) -> list[str]:
        """Options of every ssh to this host, without the program and the address."""
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": self.connect_timeout_s,
            "ServerAliveInterval": self.keepalive_s,
            "ServerAliveCountMax": self.keepalive_count,
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "StreamLocalBindMask": "0177",
            "ControlPersist": "no",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "PermitLocalCommand": "no",
            "RequestTTY": "no",
            "RemoteCommand": "none",
            "EscapeChar": "none",
            "LogLevel": "ERROR",
        }
        if self.known_hosts is not None:
            options["UserKnownHostsFile"] = f'"{self.known_hosts}"'
        if self.private_key is not None:
            options["IdentityFile"] = f'"{self.private_key}"'
        arguments = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        arguments += ["-p", str(self.port)] if self.port else []
        arguments += ["-l", self.user] if self.user else []
        return [*arguments, *self.options]


class SshSession:
    """A connection that has been made. Made by `open`, ended by `close`; it does not come back by itself."""

    def __init__(self, name: str, target: SshTarget, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._name = name
        self._target = target
        self._folder = folder
        self._process = process
        self._lock = threading.Lock()
        self._asked = 0

    @classmethod
    def open(cls, name: str, target: SshTarget, folder: Path, forwards: Sequence[str] = ()) -> SshSession:
        """Connect; `folder` (0700, short path) takes the sockets.

        forwards  arguments of -L beside that of the engine's socket
        Raises HostUnreachable with ssh's own last words, BadEnvironment without ssh or with a port in use,
        BadInput for a key file that is not there (ssh would pass it by and try others).
        """
        if target.private_key is not None and not target.private_key.is_file():
            raise BadInput.at(
                file=None, key=f"{name}: private key", found=str(target.private_key), allowed="a file"
            )
        for file in (folder / "control", folder / "engine"):
            file.unlink(missing_ok=True)
        argv = ["ssh", "-M", "-S", str(folder / "control"), *target.arguments()]
        for forward in (f"{folder / 'engine'}:{target.docker_socket}", *forwards):
            argv += ["-L", forward]
        session = cls(name, target, folder, _spawn([*argv, "--", target.address, "exec cat"], folder / "log"))
        try:
            if not session.echoes(target.connect_timeout_s + LOGIN_S):
                raise session.lost()
        except BaseException:
            session.close()
            raise
        return session

    @property
    def socket(self) -> Path:
        return self._folder / "engine"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def echoes(self, timeout_s: float) -> bool:
        """Whether the host answers within the time; false at once when ssh has ended."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return False  # whoever asked before us has waited as long
        try:
            self._asked += 1
            question = f"{os.getpid()}-{self._asked}\n".encode()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(question)
            return _read_until(self._process.stdout, question, deadline)
        except (OSError, ValueError):  # ssh has ended, or was closed by another thread
            return False
        finally:
            self._lock.release()

    def forward(self, argument: str) -> bool:
        """Add a -L to the connection; false when ssh would not."""
        return self._control(["-O", "forward", "-L", argument])

    def run(self, command: str, timeout_s: float) -> str | None:
        """What a shell command on the host printed; null when it failed or took too long."""
        argv = [*self._mux(), "--", self._target.address, command]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    def stream_argv(self, command: str) -> list[str]:
        """What runs a shell command on the host over this connection."""
        return [*self._mux(), "--", self._target.address, command]

    def lost(self) -> HostUnreachable | BadEnvironment:
        """Why there is no connection, from what ssh said last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # it closes its pipes just before it ends
        return _explained(self._name, self._target, _last_words(self._folder / "log"), self.ended())

    def close(self) -> None:
        """End ssh and whatever it started (a ProxyCommand); harmless when repeated."""
        if not self.ended():
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        if not self.ended():
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _control(self, command: list[str]) -> bool:
        argv = [*self._mux(), *command, "--", self._target.address]
        try:
            done = subprocess.run(
                argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=LOGIN_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _mux(self) -> list[str]:
        control = ["-S", str(self._folder / "control"), "-o", "ControlMaster=no"]
        return ["ssh", *control, *self._target.arguments()]


def _spawn(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for us, and we end ssh in order."""
    try:
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as words:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                bufsize=0,
                start_new_session=True,
            )
    except FileNotFoundError:
        raise BadEnvironment("ssh is not installed", remedy="install OpenSSH's client") from None


def _read_until(pipe: IO[bytes], wanted: bytes, deadline: float) -> bool:
    """Read up to the wanted line; a login shell's greeting and late answers are skipped."""
    seen = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            return False
        chunk = os.read(pipe.fileno(), 4096)
        if not chunk:
            return False
        seen = (seen + chunk)[-8192:]
        if seen.endswith(wanted):
            return True
    return False


def _last_words(log: Path) -> str:
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "; ".join(lines[-3:])
    return ""


def _explained(name: str, target: SshTarget, words: str, ended: bool) -> HostUnreachable | BadEnvironment:
    if re.search(r"Could not request local forwarding|cannot listen to port|bind .*in use", words):
        return BadEnvironment(
            f"{name}: ssh cannot forward: {words}",
            remedy="a local port that ddtree used before a break was taken meanwhile; run the command again",
        )
    who = f"{target.user}@{target.address}" if target.user else target.address
    remedy = "try 'ssh -o BatchMode=yes " + (f"-p {target.port} " if target.port else "") + f"{who} true'"
    for pattern, known in (
        (
            "Host key verification failed|REMOTE HOST IDENTIFICATION|No .* host key is known",
            "add the host's key to known_hosts (ssh-keyscan, then compare the fingerprint)",
        ),
        (
            "Permission denied",
            "the host does not take this key: check ssh.private_key, the user and your agent",
        ),
        ("Could not resolve", "check the host's address in the inventory"),
    ):
        if re.search(pattern, words, re.IGNORECASE):
            remedy = known
            break
    reason = words or ("ssh ended" if ended else "it does not answer")
    return HostUnreachable(f"{name} cannot be reached by ssh: {reason}", remedy=remedy)
