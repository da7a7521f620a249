"""A real Docker engine of the tests' own, with a small image.

`dockerd` lives in a folder of its own: data, state, sockets, pid file. It has no bridge and no iptables
rules; containers use the host's network or none.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.containers.ssh import SshTarget

IMAGE = "ddtree-test/busybox:1"
CLUSTER = "lab"
APPLETS = (
    "sh",
    "cat",
    "echo",
    "sleep",
    "httpd",
    "id",
    "true",
    "false",
    "env",
    "test",
    "kill",
    "df",
    "ls",
    "seq",
)
START_S = 120.0


@dataclass(frozen=True)
class Docker:
    """An engine that runs and one image on it."""

    socket: Path
    pid: int
    image: str
    logs: Path

    def link(self, **options: Any) -> HostLink:
        target = SshTarget("localhost", local=True, docker_socket=str(self.socket))
        return HostLink("here", target, log_folder=self.logs, **options)

    def spec(self, name: str = "lab-dflash-0", *argv: str, **changes: Any) -> ContainerSpec:
        """A container of the small image; `argv` is a shell script."""
        command = ("/bin/sh", "-c", *argv) if argv else ("/bin/sleep", "600")
        spec = ContainerSpec(
            name, CLUSTER, "dflash", 0, self.image, command, shm_gib=1, network="none", stop_timeout_s=10
        )
        return replace(spec, **changes)


@contextmanager
def run_dockerd(folder: Path, *, inside: tuple[str, ...] = ()) -> Iterator[Docker]:
    """Start an engine below `folder` (a short path) and end it with everything that it runs.

    inside  a command prefix, such as `ip netns exec NAME`
    """
    socket, log = folder / "docker.sock", folder / "dockerd.log"
    argv = [*inside, "dockerd", "-H", f"unix://{socket}", "--data-root", str(folder / "data")]
    argv += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    argv += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--storage-driver=overlay2"]
    with log.open("wb") as words:
        process = subprocess.Popen(argv, stdout=words, stderr=words, stdin=subprocess.DEVNULL)
    try:
        engine = _answering(process, socket, log)
        image = engine.import_rootfs(io.BytesIO(rootfs()), IMAGE, changes=["ENV PATH=/bin"])
        yield Docker(socket, process.pid, image, folder / "logs")
        with suppress(Exception), engine._call("end of the tests") as client:
            for entry in client.containers(all=True):
                engine._remove(str(entry["Id"]), force=True)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            for mount in _mounts_below(folder):
                subprocess.run(["umount", "-l", mount], check=False, capture_output=True)


def rootfs() -> bytes:
    """A tar of a static busybox with what the tests need around it."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "etc", "tmp", "www"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        tar.add(busybox, "bin/busybox")
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for name, text in (
            ("etc/passwd", "root:x:0:0::/:/bin/sh\nserve:x:1000:1000::/:/bin/sh\n"),
            ("www/ready", "ok\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _answering(process: subprocess.Popen[bytes], socket: Path, log: Path) -> Engine:
    engine = HostLink("here", SshTarget("localhost", local=True, docker_socket=str(socket))).engine()
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if socket.exists():
            with suppress(Exception):
                engine.info()
                return engine
        time.sleep(0.1)
    raise RuntimeError(f"dockerd did not start: {log.read_text()[-2000:]}")


def _mounts_below(folder: Path) -> list[str]:
    found = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted((mount for mount in found if mount.startswith(f"{folder}/")), key=len, reverse=True)


def require_docker() -> None:
    """Skip the test where no engine can be run."""
    if os.getuid() != 0:
        pytest.skip("a Docker engine needs root")
    for program in ("dockerd", "busybox"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
