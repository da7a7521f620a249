"""The first process of a test host: makes the host's view of the machine, starts its daemons, ends with it.

    python host_init.py build SETTINGS      in new namespaces; ends by becoming `serve` inside the new root
    python3 host_init.py serve

Standard library only, since `serve` runs on the host's own Python. Its standard input is a pipe that the
operator's process holds open: at its end, in whatever way that process ended, the host is switched off. As it
is process 1 of its namespace, the kernel then ends everything else in there, and unmounts what was mounted.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
SELF = "/usr/local/sbin/host-init"
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


def build(settings: dict[str, Any]) -> None:
    root = Path(settings["root"])
    layers = f"lowerdir={settings['lower']},upperdir={settings['upper']},workdir={settings['work']}"
    call("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
    # An overlay can't be the upper layer of another one: the engine's storage lies on the real file system.
    (root / "var/lib/docker").mkdir(mode=0o710, exist_ok=True)
    call("mount", "--bind", settings["docker"], str(root / "var/lib/docker"))
    call("mount", "-t", "proc", "proc", str(root / "proc"))
    call("mount", "-t", "sysfs", "sysfs", str(root / "sys"))
    call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "run"))
    _mount_devices(root / "dev")
    _mount_cgroups(root / "sys/fs/cgroup", settings["cgroups"])
    call("hostname", settings["name"])
    # Not chroot: runc pivots into a container's root, and can't from a root that is no mount point.
    enter = f'cd "$0" && pivot_root . mnt && umount -l mnt && exec /usr/bin/python3 {SELF} serve'
    os.execve("/bin/sh", ["sh", "-c", enter, str(root)], ENV)


def _mount_devices(folder: Path) -> None:
    call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for name, (major, minor) in DEVICES.items():
        os.mknod(folder / name, 0o20666, os.makedev(major, minor))
        (folder / name).chmod(0o666)
    for name in ("pts", "shm", "mqueue"):
        (folder / name).mkdir()
    call(
        "mount",
        "-t",
        "devpts",
        "-o",
        "newinstance,ptmxmode=0666,mode=620,gid=5",
        "devpts",
        str(folder / "pts"),
    )
    call("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(folder / "shm"))
    call("mount", "-t", "mqueue", "mqueue", str(folder / "mqueue"))
    for name, target in {
        "ptmx": "pts/ptmx",
        "fd": "/proc/self/fd",
        "stdin": "fd/0",
        "stdout": "fd/1",
    }.items():
        (folder / name).symlink_to(target)
    (folder / "stderr").symlink_to("fd/2")


def _mount_cgroups(folder: Path, hierarchies: list[str]) -> None:
    """Seen from a cgroup namespace, so that the host's own group is the top."""
    if not hierarchies:
        call("mount", "-t", "cgroup2", "cgroup2", str(folder))
        # A group with processes in it may not hand controllers down: they move into a leaf.
        leaf = folder / "init"
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text("0")
        given = (folder / "cgroup.controllers").read_text().split()
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in given))
        return
    call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for controllers in hierarchies:
        place = folder / controllers.removeprefix("name=")
        place.mkdir()
        call("mount", "-t", "cgroup", "-o", controllers, "cgroup", str(place))


def serve() -> None:
    os.environ.clear()
    os.environ.update(ENV)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    Path("/run/sshd").mkdir(mode=0o755)
    call("ip", "link", "set", "lo", "up")
    # Docker as the machine's own service, so that `service docker restart` works as on any host.
    for daemon in (["/usr/sbin/sshd", "-D", "-e"], ["/usr/sbin/service", "docker", "start"]):
        subprocess.Popen(daemon, stdin=subprocess.DEVNULL, start_new_session=True)
    _reap_until_input_ends()


def _reap_until_input_ends() -> None:
    """Orphans come to process 1. A daemon that ended stays so: that is a host with a broken daemon."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        _reap()
        ready, _, _ = select.select([0, wake], [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if wake in ready:
            os.read(wake, 4096)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def call(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(json.loads(sys.argv[2]))
    else:
        serve()
