"""The hosts that deploys are tested on: separate, able to lose their network, gone without a trace."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tools" / "e2e"))

from hosts import PACKAGES, HostFailure, TestHosts, missing_commands  # noqa: E402
from rootfs import debootstrap_tree  # noqa: E402

# The tree is made by whoever needs it first: about 100 s on a machine that never did.
pytestmark = [
    pytest.mark.root,
    pytest.mark.docker,
    pytest.mark.sshd,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
SLEEPER = """
import sys, time
sys.path.insert(0, {tools!r})
from pathlib import Path
from hosts import TestHosts
with TestHosts(Path({folder!r}), names=("gpu-a",), tree=Path({tree!r})) as hosts:
    print(hosts.run("gpu-a", ["sleep", "0"]).returncode, flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def tree() -> Path:
    if os.getuid() != 0:
        pytest.skip("namespaces and mounts need root")
    missing = missing_commands()
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    return debootstrap_tree(REPOSITORY / ".cache" / "e2e", PACKAGES)


@pytest.fixture(scope="module")
def hosts(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with TestHosts(tmp_path_factory.mktemp("hosts") / "two", tree=tree) as running:
        for name in running.names:
            _import_busybox(running, name)
        yield running


def test_each_host_has_files_processes_and_a_name_of_its_own(hosts: TestHosts) -> None:
    hosts.run("gpu-a", ["touch", "/var/lib/only-on-a"])

    listed = {name: hosts.run(name, ["ls", "/var/lib"]).stdout.split() for name in hosts.names}

    assert "only-on-a" in listed["gpu-a"]
    assert "only-on-a" not in listed["gpu-b"]
    assert not Path("/var/lib/only-on-a").exists()
    assert {hosts.run(name, ["hostname"]).stdout.strip() for name in hosts.names} == {"gpu-a", "gpu-b"}
    assert hosts.processes("gpu-a")[0][0] == 1
    assert hosts.listening("gpu-a") == ["tcp 0.0.0.0:22", "tcp [::]:22"]


def test_ssh_trusts_the_keys_on_the_disks_alone(hosts: TestHosts) -> None:
    answers = {name: _call(hosts.ssh(name, ["hostname"])) for name in hosts.names}
    known = hosts.known_hosts.read_text()
    try:
        hosts.known_hosts.write_text(
            "".join(reversed(known.splitlines(keepends=True))).replace("AAAA", "AAAB")
        )
        stranger = _call(hosts.ssh("gpu-a", ["hostname"]))
    finally:
        hosts.known_hosts.write_text(known)

    assert {name: answer.stdout.strip() for name, answer in answers.items()} == {n: n for n in hosts.names}
    assert stranger.returncode == 255
    assert "Host key verification failed" in stranger.stderr


@pytest.mark.parametrize("name", ["gpu-a", "gpu-b"])
def test_a_container_reaches_the_other_host_from_the_engines_bridge(hosts: TestHosts, name: str) -> None:
    other = next(n for n in hosts.names if n != name)

    answer = hosts.run(name, ["docker", "run", "--rm", "busybox", "ping", "-c1", "-W5", hosts.address(other)])

    assert " 0% packet loss" in answer.stdout
    assert "overlay2" in hosts.run(name, ["docker", "info", "--format", "{{.Driver}}"]).stdout


def test_a_container_in_the_hosts_network_is_seen_from_the_host_and_nowhere_else(hosts: TestHosts) -> None:
    serve = ["busybox", "nc", "-l", "-p", "8080"]
    hosts.run("gpu-a", ["docker", "run", "-d", "--name", "web", "--network", "host", *serve])
    try:
        _until(lambda: any(line.endswith(":8080") for line in hosts.listening("gpu-a")))
        assert not any(line.endswith(":8080") for line in hosts.listening("gpu-b"))
        assert any("nc -l -p 8080" in args for _, args in hosts.processes("gpu-a"))
    finally:
        hosts.run("gpu-a", ["docker", "rm", "-f", "web"])


def test_a_cut_network_comes_back_and_only_one_host_is_cut(hosts: TestHosts) -> None:
    hosts.cut_network("gpu-a")
    try:
        cut = _call(hosts.ssh("gpu-a", ["true"], connect_timeout_s=2))
        assert _call(hosts.ssh("gpu-b", ["true"])).returncode == 0
        assert hosts.run("gpu-a", ["hostname"]).stdout == "gpu-a\n", "the host itself goes on"
    finally:
        hosts.restore("gpu-a")

    assert cut.returncode == 255
    assert _call(hosts.ssh("gpu-a", ["true"])).returncode == 0


def test_a_host_that_lost_power_has_its_disk_again(hosts: TestHosts) -> None:
    hosts.run("gpu-b", ["docker", "create", "--name", "kept", "busybox", "true"])
    hosts.run("gpu-b", ["sync"])

    hosts.stop("gpu-b")
    assert _call(hosts.ssh("gpu-b", ["true"], connect_timeout_s=2)).returncode == 255
    hosts.start("gpu-b")

    assert "kept" in hosts.run("gpu-b", ["docker", "ps", "-a", "--format", "{{.Names}}"]).stdout
    assert _call(hosts.ssh("gpu-b", ["true"])).returncode == 0
    hosts.run("gpu-b", ["docker", "rm", "kept"])


def test_nothing_stays_after_an_exception_with_a_container_running(tree: Path, tmp_path: Path) -> None:
    def interrupted() -> None:
        with TestHosts(tmp_path / "hosts", names=("gpu-a",), tree=tree) as one:
            kept.append(one)
            _import_busybox(one, "gpu-a")
            one.run("gpu-a", ["docker", "run", "-d", "busybox", "sleep", "1000"])
            assert one.residue(), "while it runs there is something to see"
            raise KeyboardInterrupt

    kept: list[TestHosts] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert kept[0].residue() == []
    assert _leftovers(tmp_path) == []
    assert "Server listening" in kept[0].log("gpu-a").read_text()


def test_the_run_after_a_killed_one_cleans_up(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hosts"
    source = SLEEPER.format(tools=str(REPOSITORY / "tools" / "e2e"), folder=str(folder), tree=str(tree))
    victim = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "0\n"
        with pytest.raises(HostFailure, match=f"in use by process {victim.pid}"):
            TestHosts(folder, tree=tree).__enter__()
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()

    with TestHosts(folder, names=("gpu-a",), tree=tree):
        pass

    _until(lambda: _leftovers(tmp_path) == [])
    assert not list(Path("/sys/fs/cgroup").glob(f"**/ddtree-e2e-{victim.pid}-*"))


def test_a_folder_with_other_things_in_it_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")

    with pytest.raises(HostFailure, match="neither empty nor a folder of test hosts"):
        TestHosts(tmp_path, tree=tmp_path).__enter__()

    assert (tmp_path / "thesis.tex").read_text() == "dear"


def _import_busybox(hosts: TestHosts, name: str) -> None:
    """An image of one program, made on the host from its own files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(hosts.root(name) / "bin" / "busybox", "bin/busybox")
        for applet in ("ping", "nc", "true", "sleep"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    (hosts.root(name) / "root" / "busybox.tar").write_bytes(archive.getvalue())
    hosts.run(name, ["docker", "import", "--change", "ENV PATH=/bin", "/root/busybox.tar", "busybox"])


def _leftovers(folder: Path) -> list[str]:
    """Processes and mounts of this machine that speak of the folder."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def _until(holds, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _call(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
