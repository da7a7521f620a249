"""An engine and its services through a real sshd, which is cut, killed and mended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.failures import DockerFailure, HostUnreachable
from ddtree_ops.containers.ssh import SshTarget
from ddtree_ops.errors import BadEnvironment
from tests.support.docker import CLUSTER

from .conftest import Remote
from .test_engine import until

pytestmark = [pytest.mark.root, pytest.mark.docker, pytest.mark.sshd]
NAME = "lab-dflash-0"
PORT = 18431


def get(url: str, timeout: float = 5) -> str:
    with urllib.request.urlopen(f"{url}/ready", timeout=timeout) as answer:
        return str(answer.read().decode()).strip()


def serve(remote: Remote, link: HostLink) -> str:
    """Start a web server beside the host, at the other end of its cable; its URL from here."""
    gateway = remote.host.gateway
    spec = remote.docker.spec(
        NAME, argv=("/bin/httpd", "-f", "-p", f"{gateway}:{PORT}", "-h", "/www"), network="host"
    )
    link.engine().create(spec)
    link.engine().start(NAME)
    url = link.forward(gateway, PORT)

    def answers() -> bool:
        try:
            return get(url) == "ok"
        except OSError:
            return False

    until(answers)
    return url


def takes(thief: socket.socket, port: int) -> bool:
    """Whether the port could be had: an ssh whose session is dead may hold it for a moment longer."""
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return False
    thief.listen()
    return True


def ssh_processes() -> list[int]:
    """ssh children of this process that live."""
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.name() == "ssh" and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to its link, no ssh and no folder may outlive it."""
    with tempfile.TemporaryDirectory(prefix="ddt-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        monkeypatch.undo()
        assert ssh_processes() == []
        assert list(Path(folder).iterdir()) == []


def test_the_engine_works_through_ssh(remote: Remote) -> None:
    with remote.link() as link:
        assert not link.alive()
        engine = link.engine()
        assert engine.run_once(remote.docker.spec("lab-x-0", "echo far"), timeout_s=120).output == "far"
        assert link.alive()
        assert len(ssh_processes()) == 1
        assert link.run("echo $((6 * 7))") == "42\n"
        assert link.run("exit 3") is None


def test_a_service_is_reached_through_a_forwarded_port_that_stays_the_same(remote: Remote) -> None:
    with remote.link() as link:
        url = serve(remote, link)
        assert url.startswith("http://127.0.0.1:")
        assert serve_url(link, remote) == url
        assert get(url) == "ok"


def serve_url(link: HostLink, remote: Remote) -> str:
    return link.forward(remote.host.gateway, PORT)


def test_a_killed_connection_is_unreachable_and_comes_back_on_the_same_port(remote: Remote) -> None:
    with remote.link() as link:
        url = serve(remote, link)
        follow = link.engine().logs(NAME, follow=True)
        ended: list[BaseException] = []

        def read() -> None:
            try:
                list(follow)
            except BaseException as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.3)
        remote.host.end_sessions()
        reader.join(60)
        assert [type(error) for error in ended] == [HostUnreachable]
        assert not link.alive()
        found = link.engine().find(NAME)  # connects again
        assert found is not None
        assert found.running
        assert get(url) == "ok"
        assert serve_url(link, remote) == url


def test_a_call_that_is_under_way_when_ssh_dies_says_unreachable_and_not_failed(remote: Remote) -> None:
    with remote.link() as link:
        link.engine().create(remote.docker.spec())
        link.engine().start(NAME)
        threading.Timer(0.5, remote.host.end_sessions).start()
        with pytest.raises(HostUnreachable, match="during /bin/sleep in lab-dflash-0"):
            link.engine().exec(NAME, ["/bin/sleep", "300"], timeout_s=200)


def test_a_silent_network_is_unreachable_within_seconds_and_mends(remote: Remote) -> None:
    with remote.link(probe_s=1) as link:
        url = serve(remote, link)
        remote.host.cut()
        started = time.monotonic()
        assert not link.alive()
        assert time.monotonic() - started < 60
        with pytest.raises(HostUnreachable):
            link.engine().find(NAME)
        with pytest.raises(HostUnreachable):
            link.engine().ours(CLUSTER)
        assert time.monotonic() - started < 150
        remote.host.mend()
        until(lambda: back(link))
        assert get(url) == "ok"


def back(link: HostLink) -> bool:
    try:
        found = link.engine().find(NAME)
    except HostUnreachable:
        return False
    assert found is not None
    return found.running


def test_a_host_that_comes_back_in_time_is_waited_for(remote: Remote) -> None:
    remote.host.cut()
    threading.Timer(1, remote.host.mend).start()
    with remote.link(patience_s=120) as link:
        assert link.engine().info().version


def never(seconds: float) -> None:
    pytest.fail(f"it is tried again after {seconds} s")


def test_an_unknown_host_key_is_refused_at_once(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    with (
        remote.link(target={"known_hosts": tmp_path / "known_hosts"}, patience_s=600, sleep=never) as link,
        pytest.raises(HostUnreachable, match="Host key verification failed") as caught,
    ):
        link.connect()
    assert "known_hosts" in (caught.value.remedy or "")


def test_a_key_that_the_host_does_not_take_is_refused_at_once(remote: Remote, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    with (
        remote.link(target={"private_key": key}, patience_s=600, sleep=never) as link,
        pytest.raises(HostUnreachable, match="Permission denied") as caught,
    ):
        link.connect()
    assert "key" in (caught.value.remedy or "")


def test_a_user_s_own_options_do_not_switch_off_the_check_of_keys(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    options = ("-o", "StrictHostKeyChecking=no")
    with (
        remote.link(target={"known_hosts": tmp_path / "known_hosts", "options": options}) as link,
        pytest.raises(HostUnreachable, match="Host key verification failed"),
    ):
        link.connect()


def test_a_host_without_an_engine_is_a_failure_of_docker_and_not_unreachable(
    remote: Remote, tmp_path: Path
) -> None:
    target = replace(remote.host.target(), docker_socket=str(tmp_path / "nothing.sock"))
    with (
        HostLink("gpu-a", target, patience_s=0) as link,
        pytest.raises(DockerFailure, match="not running: there is no socket") as caught,
    ):
        link.engine().info()
    assert "systemctl start docker" in (caught.value.remedy or "")


def test_an_engine_that_ended_is_told_from_a_socket_that_is_not_there(remote: Remote, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))  # nobody listens
    for target in (
        replace(remote.host.target(), docker_socket=str(tmp_path / "left.sock")),
        SshTarget("localhost", local=True, docker_socket=str(tmp_path / "left.sock")),
    ):
        with (
            HostLink("gpu-a", target, patience_s=0) as link,
            pytest.raises(DockerFailure, match="not running: nobody answers"),
        ):
            link.engine().info()


def test_a_user_without_rights_to_the_socket_is_told_the_group(remote: Remote) -> None:
    """In a child that gives up root, on this machine's own engine."""
    code = (
        "import os, sys\n"
        "from ddtree_ops.containers import sdk\n"
        "from ddtree_ops.containers.connection import HostLink, SshTarget\n"
        "import docker.errors, requests, urllib3\n"
        f"target = SshTarget('localhost', local=True, docker_socket={str(remote.docker.socket)!r})\n"
        "link = HostLink('gpu-a', target)\n"
        f"os.chmod({str(remote.docker.socket.parent)!r}, 0o711)\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "os.environ['HOME'] = '/nonexistent'\n"
        "try:\n    link.engine().info()\n"
        "except Exception as error:\n    print(type(error).__name__, error, error.remedy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DockerFailure gpu-a: permission denied on the engine's socket")
    assert "usermod -aG docker" in done.stdout


def test_a_port_that_was_taken_during_a_break_is_named(remote: Remote) -> None:
    with remote.link() as link:
        url = serve(remote, link)
        remote.host.end_sessions()
        until(lambda: not link.alive())
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            until(lambda: takes(thief, int(url.rpartition(":")[2])))
            with pytest.raises(BadEnvironment, match="cannot forward"):
                link.engine().find(NAME)
        assert link.engine().find(NAME) is not None
        assert get(url) == "ok"


def test_a_local_port_that_is_taken_is_passed_by(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as thief, remote.link() as link:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        taken = thief.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        monkeypatch.setattr("ddtree_ops.containers.connection.free_port", iter([taken, free]).__next__)
        assert link.forward("127.0.0.1", PORT) == f"http://127.0.0.1:{free}"


def test_an_image_moves_from_here_to_the_host_and_a_cut_leaves_it_out(remote: Remote) -> None:
    with remote.docker.link() as here, remote.link() as there:
        chunks = list(here.engine().save(remote.docker.image))

        def cut_in_the_middle() -> Iterator[bytes]:
            half = len(b"".join(chunks)) // 2
            yield b"".join(chunks)[:half]
            remote.host.end_sessions()
            time.sleep(0.5)
            yield b"".join(chunks)[half:]

        with pytest.raises(HostUnreachable):
            there.engine().load(cut_in_the_middle())
        assert there.engine().load(iter(chunks)) == remote.docker.image


def test_an_error_in_the_middle_leaves_no_ssh(remote: Remote) -> None:
    def work() -> None:
        with remote.link() as link:
            link.connect()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        work()


def test_a_closed_link_does_not_come_back(remote: Remote) -> None:
    link = remote.link()
    link.connect()
    link.close()
    link.close()
    with pytest.raises(HostUnreachable, match="closed"):
        link.engine().info()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_ssh_outlives_the_program_that_made_it(remote: Remote, number: signal.Signals) -> None:
    """Ctrl-C reaches the whole foreground group: only the program itself may act on it."""
    target = remote.host.target(docker_socket=str(remote.docker.socket))
    code = (
        "import sys, time, pathlib\n"
        "from ddtree_ops.containers.connection import HostLink, SshTarget\n"
        f"target = SshTarget({target.address!r}, {target.port}, 'root',\n"
        f"    pathlib.Path({str(target.private_key)!r}), pathlib.Path({str(target.known_hosts)!r}),\n"
        f"    docker_socket={target.docker_socket!r})\n"
        "with HostLink('gpu-a', target) as link:\n"
        "    link.connect()\n"
        "    try:\n"
        "        print(link._session.pid, link._session.socket.parent, flush=True)\n"
        "        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n"
        "        print(link.alive(), flush=True)\n"
        "        sys.exit(130)\n"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        pid, folder = program.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        os.killpg(program.pid, number)
        if number is signal.SIGINT:
            assert program.stdout.readline() == "True\n"
            assert program.wait(60) == 130
            assert not Path(folder).exists()
        else:
            program.wait(60)
    until(lambda: not psutil.pid_exists(int(pid)))
    if number is signal.SIGKILL:
        shutil.rmtree(folder)  # nobody was left to do it
