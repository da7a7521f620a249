"""A host behind a real sshd: a network namespace at the end of a veth pair, with the same file system."""

from __future__ import annotations

import ipaddress
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_ops.containers.ssh import SshTarget

PORT = 2222
START_S = 60.0
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Hosts of one process have names and networks of their own: a fixture may outlive the test that made it.
COUNT = itertools.count()
NETWORKS = ipaddress.IPv4Network("10.233.0.0/16")


@dataclass(frozen=True)
class NetnsHost:
    """A host that can be reached by ssh with this key, and cut off. `gateway` is our end of its network."""

    namespace: str
    link: str
    address: str
    gateway: str
    folder: Path

    @property
    def temporary(self) -> Path:
        """What the host takes for /tmp: its own, where others leave nothing."""
        return self.folder / "tmp"

    @property
    def programs(self) -> Path:
        """First in the PATH of who logs in: a place for stand-ins of what the host lacks."""
        return self.folder / "bin"

    def target(self, **changes: object) -> SshTarget:
        options: dict[str, object] = {
            "address": self.address,
            "port": PORT,
            "user": "root",
            "private_key": self.folder / "user_key",
            "known_hosts": self.folder / "known_hosts",
            "connect_timeout_s": 2,
            "keepalive_s": 1,
            "keepalive_count": 2,
        }
        return SshTarget(**{**options, **changes})  # type: ignore[arg-type]

    def inside(self, *argv: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace, *argv)

    def cut(self) -> None:
        """No packet gets through, and nobody is told."""
        _run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.link, "up")

    def end_sessions(self) -> None:
        """End all connections at the host's side; sshd itself goes on."""
        for pid in self._sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _sessions(self) -> list[int]:
        answer = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        found = []
        for pid in map(int, answer.stdout.split()):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command.startswith(b"sshd: root"):
                    found.append(pid)
        return found


@contextmanager
def run_sshd(folder: Path) -> Iterator[NetnsHost]:
    """Skips the test where that cannot be; ends sshd and removes the network afterwards."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if os.getuid() != 0 or sshd is None or shutil.which("ip") is None:
        pytest.skip("needs root, openssh-server and iproute2")
    host, inner = _new_host(folder)
    host.temporary.mkdir(mode=0o700)
    server = None
    try:
        _make_network(host, inner)
        _write_keys(host)
        Path("/run/sshd").mkdir(exist_ok=True)
        with (folder / "sshd.log").open("wb") as log:
            argv = host.inside(sshd, "-D", "-e", "-f", str(folder / "sshd_config"))
            server = subprocess.Popen(argv, stderr=log)
        _wait_until_open(server, host)
        yield host
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
        host.end_sessions()
        for what in (("link", "del", host.link), ("netns", "del", host.namespace)):
            subprocess.run(["ip", *what], capture_output=True, check=False)


def _new_host(folder: Path) -> tuple[NetnsHost, str]:
    """A host and the name of its end of the link."""
    number, count = os.getpid() % 1_000_000, next(COUNT)
    name = f"{number}x{count}"
    subnet = (number * 8 + count) % (NETWORKS.num_addresses // 4) * 4
    gateway, address = (str(NETWORKS.network_address + subnet + last) for last in (1, 2))
    return NetnsHost(f"ddtree-c{name}", f"ddc{name}o", address, gateway, folder), f"ddc{name}i"


def _make_network(host: NetnsHost, inner: str) -> None:
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", inner, "netns", host.namespace)
    _run("ip", "addr", "add", f"{host.gateway}/30", "dev", host.link)
    _run("ip", "link", "set", host.link, "up")
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", inner)
    _run("ip", "-n", host.namespace, "link", "set", inner, "up")
    _run("ip", "-n", host.namespace, "link", "set", "lo", "up")


def _write_keys(host: NetnsHost) -> None:
    """known_hosts comes from the key file itself: what an operator does who compares fingerprints."""
    folder = host.folder
    for name in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[{host.address}]:{PORT} {key}\n")
    (folder / "sshd_config").write_text(
        f"Port {PORT}\nListenAddress {host.address}\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
        f"SetEnv TMPDIR={host.temporary} PATH={host.programs}:{STANDARD_PATH}\n"
    )


def _wait_until_open(server: subprocess.Popen[bytes], host: NetnsHost) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(PORT), host.address]
        if subprocess.run(scan, capture_output=True, text=True, check=False).stdout:
            return
        time.sleep(0.1)
    raise RuntimeError(f"sshd did not start: {(host.folder / 'sshd.log').read_text()}")


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
