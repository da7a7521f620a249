"""Hosts to run the playbooks on: this machine, and one behind a real sshd in a network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.hosts.inventory import Host, Inventory
from ddtree_ops.hosts.runner import Ansible, SshOptions

#: Of this process alone: test runs beside each other do not meet.
NAMESPACE = f"ddtree-{os.getpid()}"
OUTSIDE, INSIDE = f"ddt{os.getpid() % 100000}o", f"ddt{os.getpid() % 100000}i"
GATEWAY, ADDRESS = (f"10.231.{os.getpid() % 250}.{last}" for last in (1, 2))
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}


def local(log_folder: Path | None = None, secrets: dict[str, str] | None = None, **variables: Any) -> Ansible:
    """A runner for this machine, as the user that runs the tests."""
    inventory = Inventory((Host("here", {**LOCAL, **variables}),))
    return Ansible(inventory, ssh=SshOptions(become=False), secrets=secrets, log_folder=log_folder)


def play(folder: Path, tasks: str, *, hosts: str = "all") -> Path:
    """A playbook of these tasks."""
    lines = "\n".join(f"    {line}" for line in tasks.strip("\n").splitlines())
    file = folder / "play.yml"
    file.write_text(f"- hosts: {hosts}\n  gather_facts: false\n  tasks:\n{lines}\n")
    return file


@dataclass(frozen=True)
class SshHost:
    """A host that can be reached by ssh with this key, once its own key is known."""

    address: str
    port: int
    private_key: Path
    known_hosts: Path

    def runner(
        self, *, known_hosts: Path | None = None, port: int | None = None, timeout_s: int = 10
    ) -> Ansible:
        variables = {
            "ansible_host": self.address,
            "ansible_port": port or self.port,
            "ansible_user": "root",
            "ansible_python_interpreter": sys.executable,
        }
        ssh = SshOptions(
            known_hosts=known_hosts or self.known_hosts,
            private_key=self.private_key,
            connect_timeout_s=timeout_s,
            become=False,
        )
        return Ansible(Inventory((Host("gpu-a", variables),)), ssh=ssh)


@pytest.fixture(scope="module")
def ssh_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ip") is None:
        pytest.skip("needs openssh-server and iproute2")
    folder = tmp_path_factory.mktemp("sshd")
    server = None
    try:
        _make_namespace()
        for name in ("host_key", "user_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        config = folder / "sshd_config"
        config.write_text(
            f"Port 2222\nListenAddress {ADDRESS}\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        argv = ["ip", "netns", "exec", NAMESPACE, sshd, "-D", "-e", "-f", str(config)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(argv, stderr=log)
        _wait_for_key(server, folder)
        yield SshHost(ADDRESS, 2222, folder / "user_key", folder / "known_hosts")
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
        _end_sessions()
        for what in (("link", "del", OUTSIDE), ("netns", "del", NAMESPACE)):
            subprocess.run(["ip", *what], capture_output=True, check=False)


def _make_namespace() -> None:
    run("ip", "netns", "add", NAMESPACE)
    run("ip", "link", "add", OUTSIDE, "type", "veth", "peer", "name", INSIDE, "netns", NAMESPACE)
    run("ip", "addr", "add", f"{GATEWAY}/30", "dev", OUTSIDE)
    run("ip", "link", "set", OUTSIDE, "up")
    run("ip", "-n", NAMESPACE, "addr", "add", f"{ADDRESS}/30", "dev", INSIDE)
    run("ip", "-n", NAMESPACE, "link", "set", INSIDE, "up")
    run("ip", "-n", NAMESPACE, "link", "set", "lo", "up")


def _end_sessions() -> None:
    """Connections that ssh keeps for reuse have server processes that would outlive their network."""
    answer = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True, check=False)
    for pid in answer.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)


def _wait_for_key(server: subprocess.Popen[bytes], folder: Path) -> None:
    """Take the host's key as an operator would after comparing it: from the key file itself."""
    deadline = time.monotonic() + 60
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    while time.monotonic() < deadline and server.poll() is None:
        scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", "2222", ADDRESS]
        answer = subprocess.run(scan, capture_output=True, text=True, check=False)
        if key in answer.stdout:
            (folder / "known_hosts").write_text(f"[{ADDRESS}]:2222 {key}\n")
            return
        time.sleep(0.1)
    raise RuntimeError(f"sshd did not start: {(folder / 'log').read_text()}")


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
