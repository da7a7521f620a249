"""Test hosts on one machine: what a deploy meets, with nothing mocked.

    with TestHosts(folder, tree=debootstrap_tree(...)) as hosts:
        hosts.run("gpu-a", ["docker", "ps"])

Each host has its own root file system (an overlay on one debootstrap tree), network, processes, hostname and
control groups, with an sshd and a Docker engine inside. The hosts and the operator (the machine itself) meet
on a switch in a network namespace of its own: no rule or setting of the machine's own network is touched.

A host lives as long as its process 1 (`host_init.py`), and that one as long as the pipe that this process
holds open. So nothing stays when this process ends in any way, SIGKILL included, except folders and empty
control groups, which the next start in the same folder sweeps away. Needs root, and COMMANDS on the machine;
Docker runs in the hosts alone.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

#: What a host needs beyond Debian's smallest system.
PACKAGES = (
    "busybox-static", "ca-certificates", "docker.io", "iproute2", "iptables", "kmod", "openssh-server",
    "openssh-sftp-server", "procps", "python3", "sudo",
)  # fmt: skip
COMMANDS = ("debootstrap", "ip", "nsenter", "ssh", "ssh-keygen", "ssh-keyscan", "unshare")
INIT = Path(__file__).with_name("host_init.py")
PREFIX = "ddtree-e2e"
CGROUPS = Path("/sys/fs/cgroup")
#: Namespaces that a command inside a host joins.
_NUMBERS = itertools.count()
JOINED = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
"""


class HostFailure(RuntimeError):
    """A test host did not start, or something of it stayed."""


@dataclass(frozen=True)
class RunningHost:
    """A host that is on. `pid` is its process 1, as the machine sees it; `holder` waits for that one."""

    name: str
    address: str
    folder: Path
    holder: subprocess.Popen[bytes]
    pid: int

    @property
    def root(self) -> Path:
        """The host's file system, also for what is mounted in there."""
        return Path(f"/proc/{self.pid}/root")


class TestHosts:
    """Hosts that are on inside the `with` block. `folder` is for them alone and is emptied, but for logs.

    tree  a Debian with PACKAGES; only read, and shared by all hosts
    """

    __test__ = False  # not a test, although pytest likes the name

    def __init__(
        self, folder: Path, names: Sequence[str] = ("gpu-a", "gpu-b"), *, tree: Path, timeout_s: float = 60.0
    ) -> None:
        self.folder = folder.resolve()
        self.names = tuple(names)
        self._tree = tree.resolve()
        self._timeout_s = timeout_s
        number = next(_NUMBERS)
        self._id = f"{PREFIX}-{os.getpid()}-{number}"
        self._link = f"ddte{os.getpid()}n{number}"
        self._running: dict[str, RunningHost] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._addresses: dict[str, str] = {}
        self._known_pids: set[int] = set()

    # -- life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> TestHosts:
        if os.getuid() != 0:
            raise HostFailure("test hosts need root")
        sweep_stale(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._make_keys()
            self._make_switch()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *names: str) -> None:
        """Switch hosts on, all of them by default; returns when sshd and the engine answer."""
        wanted = [name for name in names or self.names if name not in self._running]
        for name in wanted:
            self._boot(name)
        for name in wanted:
            self._wait_until_up(self._running[name])
        self._write_known_hosts()

    def stop(self, *names: str) -> None:
        """Switch hosts off at once, as a power cut does. Their disks stay until `close`."""
        hosts = [self._running.pop(name) for name in names or self.names if name in self._running]
        for host in hosts:
            assert host.holder.stdin is not None
            host.holder.stdin.close()
        for host in hosts:
            _end(host.holder, inner=host.pid)
            _remove_cgroups(f"{self._id}/{host.name}")

    def close(self) -> None:
        """Everything off and gone, except each host's log and the keys' folder."""
        self.stop()
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            _end(self._switch)
            self._switch = None
            _remove_link(self._link)
        _remove_cgroups(self._id)
        for name in self.names:
            for part in ("root", "upper", "work", "docker"):
                shutil.rmtree(self.folder / name / part, ignore_errors=True)
        left = self.residue()
        if left:
            raise HostFailure("left behind: " + "; ".join(left))

    # -- use ------------------------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        return self._addresses[name]

    @property
    def private_key(self) -> Path:
        return self.folder / "keys" / "operator"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "keys" / "known_hosts"

    def root(self, name: str) -> Path:
        """The root file system of a host that is on."""
        return self._running[name].root

    def log(self, name: str) -> Path:
        """What the host's first process, its sshd and its set-up wrote."""
        return self.folder / name / "log"

    def run(
        self, name: str, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """A command inside the host, not over its network: works while that is cut."""
        result = subprocess.run(
            [*self._inside(name), *argv], capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and result.returncode:
            raise HostFailure(
                f"{name}: {shlex.join(argv)} ended with {result.returncode}: {result.stderr or result.stdout}"
            )
        return result

    def ssh(self, name: str, argv: Sequence[str], *, connect_timeout_s: int = 10) -> list[str]:
        """The argv that runs a command on the host over its network, as the operator's own `ssh` would."""
        options = {
            "BatchMode": "yes", "IdentitiesOnly": "yes", "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self.known_hosts), "ConnectTimeout": str(connect_timeout_s),
        }  # fmt: skip
        flags = [flag for key, value in options.items() for flag in ("-o", f"{key}={value}")]
        target = f"root@{self.address(name)}"
        return ["ssh", "-F", "none", "-i", str(self.private_key), *flags, target, shlex.join(argv)]

    def cut_network(self, name: str) -> None:
        """Pull the host's cable: nothing gets in or out, and nobody is told."""
        self._on_switch("ip", "link", "set", name, "down")

    def restore(self, name: str) -> None:
        self._on_switch("ip", "link", "set", name, "up")

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Process ids and command lines in the host, its containers' included; as the host numbers them."""
        answer = self.run(name, ["ps", "-e", "-o", "pid=", "-o", "args="])
        pairs = [line.split(maxsplit=1) for line in answer.stdout.splitlines()]
        return [(int(pid), args) for pid, args in pairs if not args.startswith("ps -e -o pid=")]

    def listening(self, name: str) -> list[str]:
        """What accepts connections in the host's own network, as `tcp 0.0.0.0:22`."""
        answer = self.run(name, ["ss", "-H", "-l", "-n", "-t", "-u"])
        fields = [line.split() for line in answer.stdout.splitlines()]
        return sorted(f"{kind} {address}" for kind, _, _, _, address, *_ in fields)

    def cluster_keys(self) -> dict[str, Any]:
        """The keys `hosts` and `ssh` of a cluster.yaml that names these hosts."""
        python = {"ansible_python_interpreter": "/usr/bin/python3"}
        return {
            "hosts": {
                "inline": {
                    name: {"address": self.address(name), "user": "root", "port": 22, "vars": python}
                    for name in self.names
                }
            },
            "ssh": {
                "private_key": str(self.private_key),
                "known_hosts": str(self.known_hosts),
                "become": False,
            },
        }

    def residue(self) -> list[str]:
        """What is left of hosts that are off: processes, links, mounts, control groups, disks."""
        found = [f"process {pid}" for pid in self._known_pids if Path(f"/proc/{pid}").exists()]
        found += [f"link {name}" for name in _links() if name == self._link]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line.split()[4]}" for line in mounts if str(self.folder) in line.split()[4]]
        found += [f"control group {place}" for place in _cgroup_folders(self._id)]
        for name in self.names:
            found += [
                f"folder {p}" for part in ("upper", "docker") if (p := self.folder / name / part).exists()
            ]
        return found

    # -- making ---------------------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        keys = self.folder / "keys"
        keys.mkdir(mode=0o700)
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "operator", "-f", str(self.private_key))

    def _make_switch(self) -> None:
        """A namespace that holds a bridge; `cat` ends when its input does, and the namespace with it."""
        self._switch = subprocess.Popen(
            ["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._known_pids.add(self._switch.pid)
        self._record()
        _wait_for_namespace(self._switch.pid)
        network = _free_network()
        operator, *others = (str(address) for address in network.hosts())
        self._addresses = dict(zip(self.names, others[9:], strict=False))
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        pid = str(self._switch.pid)
        call("ip", "link", "add", self._link, "type", "veth", "peer", "name", "operator", "netns", pid)
        self._on_switch("ip", "link", "set", "operator", "master", "bridge", "up")
        call("ip", "addr", "add", f"{operator}/24", "dev", self._link)
        call("ip", "link", "set", self._link, "up")

    def _boot(self, name: str) -> None:
        folder = self.folder / name
        self._write_disk(name, folder)
        hierarchies = _hierarchies()
        groups = _make_cgroups(f"{self._id}/{name}", hierarchies)
        settings = {
            "name": name,
            "lower": str(self._tree),
            **{part: str(folder / part) for part in ("root", "upper", "work", "docker")},
            "cgroups": [controllers for controllers, _ in hierarchies],
        }
        join = " && ".join(f"echo 0 > {shlex.quote(str(group / 'cgroup.procs'))}" for group in groups)
        build = [sys.executable, "-I", str(INIT), "build", json.dumps(settings)]
        new = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        argv = ["unshare", *new, "--", "sh", "-c", f"{join} && exec unshare --cgroup -- {shlex.join(build)}"]
        with self.log(name).open("ab") as log:
            holder = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self._known_pids.add(holder.pid)
        self._record()
        try:
            pid = _first_child(holder, self.log(name))
        except BaseException:
            holder.kill()
            holder.wait()
            raise
        self._known_pids.add(pid)
        self._running[name] = RunningHost(name, self.address(name), folder, holder, pid)
        self._record()
        self._plug_in(name, pid)

    def _write_disk(self, name: str, folder: Path) -> None:
        """The host's own files on top of the tree. A disk that exists is kept: the host was switched off."""
        upper = folder / "upper"
        if upper.exists():
            return
        for part in ("root", "upper", "work", "docker"):
            (folder / part).mkdir(parents=True)
        # The overlay takes the top's mode from here, and its sshd wants it.
        for place in (folder / "root", upper):
            place.chmod(0o755)
        etc, home = upper / "etc", upper / "root"
        for place, mode in ((etc, 0o755), (etc / "ssh", 0o755), (home, 0o700), (home / ".ssh", 0o700)):
            place.mkdir()
            place.chmod(mode)
        key = etc / "ssh" / "ssh_host_ed25519_key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key))
        (etc / "ssh" / "sshd_config").write_text(SSHD_CONFIG)
        shutil.copy(self.private_key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
        (home / ".ssh" / "authorized_keys").chmod(0o600)
        (etc / "hostname").write_text(f"{name}\n")
        names = "".join(f"{address}\t{other}\n" for other, address in self._addresses.items())
        (etc / "hosts").write_text(f"127.0.0.1\tlocalhost\n{names}")
        (etc / "resolv.conf").write_text("")
        # Debian's start script raises limits, which may not be allowed here, and mounts control groups.
        (etc / "default").mkdir()
        (etc / "default" / "docker").write_text("ulimit() { :; }\n")
        (etc / "fstab").write_text("cgroup /sys/fs/cgroup none defaults 0 0\n")
        program = upper / "usr" / "local" / "sbin" / "host-init"
        program.parent.mkdir(parents=True)
        shutil.copy(INIT, program)

    def _plug_in(self, name: str, pid: int) -> None:
        """A cable from the host's eth0 to the switch. Its card has the same address after a power cut."""
        peer = ["peer", "name", "eth0", "address", _card_address(self.address(name)), "netns", str(pid)]
        self._on_switch("ip", "link", "add", name, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", name, "master", "bridge", "up")
        inside = ["nsenter", "--target", str(pid), "--net", "--", "ip"]
        call(*inside, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        call(*inside, "link", "set", "eth0", "up")

    def _wait_until_up(self, host: RunningHost) -> None:
        """sshd shows the key that lies on the host's own disk, and the engine answers."""
        key = self._host_key(host.name)
        deadline = time.monotonic() + self._timeout_s
        missing = "sshd"
        while time.monotonic() < deadline and host.holder.poll() is None:
            if missing == "sshd":
                scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", host.address]
                seen = subprocess.run(scan, capture_output=True, text=True, check=False).stdout
                missing = "docker" if key in seen else missing
            elif self.run(host.name, ["docker", "info"], check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise HostFailure(
            f"{host.name}: no {missing} after {self._timeout_s:.0f} s\n{self._last_words(host)}"
        )

    def _last_words(self, host: RunningHost) -> str:
        logs = (self.log(host.name), host.folder / "upper" / "var" / "log" / "docker.log")
        return "\n".join(line for log in logs if log.exists() for line in log.read_text().splitlines()[-20:])

    def _host_key(self, name: str) -> str:
        file = self.folder / name / "upper" / "etc" / "ssh" / "ssh_host_ed25519_key.pub"
        return " ".join(file.read_text().split()[:2])

    def _write_known_hosts(self) -> None:
        """Keys as an operator has them after comparing: from the key files, not from the network."""
        lines = [
            f"{self.address(name)} {self._host_key(name)}\n" for name in self.names if name in self._running
        ]
        self.known_hosts.write_text("".join(lines))

    def _inside(self, name: str) -> list[str]:
        pid = str(self._running[name].pid)
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", pid, *JOINED, "--root", "--wd"]
        return [*enter, "--", "/usr/bin/env", "-i", path, "HOME=/root", "LANG=C.UTF-8"]

    def _on_switch(self, *argv: str) -> None:
        assert self._switch is not None
        call("nsenter", "--target", str(self._switch.pid), "--net", "--", *argv)

    def _record(self) -> None:
        """For the run after one that was killed."""
        pids = {str(pid): _start_time(pid) for pid in self._known_pids}
        owner = {"pid": os.getpid(), "started": _start_time(os.getpid())}
        record = {"id": self._id, "link": self._link, "owner": owner, "pids": pids}
        (self.folder / "hosts.json").write_text(json.dumps(record))


def sweep_stale(folder: Path) -> None:
    """Remove what a run that was killed left: processes by their recorded ids, control groups, the folder."""
    for group in {place.name for place in _cgroup_tops()}:
        if _start_time(int(group.removeprefix(f"{PREFIX}-").partition("-")[0])) is None:
            _remove_cgroups(group)
    file = folder / "hosts.json"
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise HostFailure(f"{folder}: neither empty nor a folder of test hosts")
        return
    record = json.loads(file.read_text())
    owner = record["owner"]
    if owner["started"] is not None and _start_time(owner["pid"]) == owner["started"]:
        raise HostFailure(f"{folder}: in use by process {owner['pid']}")
    for pid, started in record["pids"].items():
        if started is not None and _start_time(int(pid)) == started:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            _wait_until(partial(_ended, int(pid), started), f"process {pid} stays")
    _remove_cgroups(record["id"])
    _remove_link(record["link"])
    shutil.rmtree(folder)


def missing_commands() -> list[str]:
    """What test hosts need and this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in COMMANDS if shutil.which(name, path=path) is None]


def call(*argv: str) -> None:
    result = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise HostFailure(f"{shlex.join(argv)} ended with {result.returncode}: {result.stderr.strip()}")


def _end(holder: subprocess.Popen[bytes], inner: int | None = None) -> None:
    """Wait for a host or switch whose input has ended; kill what does not listen."""
    try:
        holder.wait(10)
    except subprocess.TimeoutExpired:
        holder.kill()  # its child goes with it: --kill-child
        holder.wait()
    if inner is not None:
        _wait_until(lambda: not Path(f"/proc/{inner}").exists(), f"process {inner} stays")


def _first_child(holder: subprocess.Popen[bytes], log: Path) -> int:
    """The host's process 1, in the machine's numbers, once it has entered its own root."""
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    pid = 0

    def entered() -> bool:
        nonlocal pid
        if holder.poll() is not None:
            raise HostFailure(f"the host ended at once: {log.read_text()[-2000:]}")
        pid = int((children.read_text().split() or ["0"])[0])
        return bool(pid) and b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

    _wait_until(entered, "a host's first process does not start")
    return pid


def _wait_for_namespace(pid: int) -> None:
    own = Path("/proc/self/ns/net").readlink()
    _wait_until(lambda: Path(f"/proc/{pid}/ns/net").readlink() != own, "no network namespace")


def _wait_until(holds: Callable[[], bool], otherwise: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise HostFailure(otherwise)
        time.sleep(0.02)


def _start_time(pid: int) -> str | None:
    """Clock ticks after boot: with the id, the name of one process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _card_address(address: str) -> str:
    """A hardware address of our own making for an IPv4 address."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def _remove_link(name: str) -> None:
    """The kernel takes it away with its other end's namespace, but some time later."""
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def _ended(pid: int, started: str) -> bool:
    return _start_time(pid) != started


def _links() -> list[str]:
    answer = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True)
    return [link["ifname"] for link in json.loads(answer.stdout)]


def _free_network() -> ipaddress.IPv4Network:
    """A /24 that no route of the machine leads to, other than its default one."""
    answer = subprocess.run(["ip", "-j", "-4", "route"], capture_output=True, text=True, check=True)
    taken = [
        ipaddress.IPv4Network(route["dst"])
        for route in json.loads(answer.stdout)
        if route["dst"] != "default"
    ]
    for step in range(256):
        network = ipaddress.IPv4Network(f"10.232.{(os.getpid() + step) % 256}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise HostFailure("no free network below 10.232.0.0/16")


def _hierarchies() -> list[tuple[str, Path]]:
    """Mounted cgroup-v1 hierarchies with their controllers; none where the machine has version 2 alone."""
    if (CGROUPS / "cgroup.controllers").exists():
        return []
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, rest = line.split()[4], *line.partition(" - ")[1:]
        kind, _, options = rest.split(maxsplit=2)
        if kind == "cgroup":
            controllers = [o for o in options.split(",") if o not in {"rw", "ro", "xattr", "clone_children"}]
            names = [o for o in controllers if not o.startswith("release_agent=")]
            found.append((",".join(names), Path(place)))
    return found


def _make_cgroups(name: str, hierarchies: list[tuple[str, Path]]) -> list[Path]:
    tops = [place for _, place in hierarchies] or [CGROUPS]
    for top in tops:
        (top / name).mkdir(parents=True, exist_ok=True)
        if (top / "cpuset.cpus").exists():  # a new set is empty, and takes no process
            for group in ((top / name).parent, top / name):
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((top / file).read_text())
    return [top / name for top in tops]


def _cgroup_tops(name: str = f"{PREFIX}-*") -> list[Path]:
    """Groups in every hierarchy, of version 1 and 2."""
    return [*CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")]


def _cgroup_folders(name: str) -> Iterator[Path]:
    """All groups below the named one and it, children first."""
    for top in _cgroup_tops(name):
        yield from sorted((Path(place) for place, _, _ in os.walk(top)), reverse=True)


def _remove_cgroups(name: str) -> None:
    """Empty groups of hosts that are off. The kernel may need a moment until it has seen the last one go."""

    def gone() -> bool:
        for group in _cgroup_folders(name):
            with suppress(OSError):
                group.rmdir()
        return not list(_cgroup_folders(name))

    _wait_until(gone, f"control groups {name} stay")
