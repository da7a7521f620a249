"""The machine itself: system, clock, ports, disks."""

from __future__ import annotations

from ddtree_ops.hosts.checks.expectations import GIB, Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.checks.table import Check, Verdict, into, judged, numbers, skip
from ddtree_ops.hosts.facts import HostFacts

DEPLOYED_FREE = 20 * GIB
CHECKS: dict[str, Check] = {}
check = into(CHECKS)


@check(
    "host.os",
    wanted="Ubuntu 24.04",
    otherwise="warn",
    remedy="other systems may work, but the roles and the driver's packages are tried on Ubuntu 24.04",
    gpu=False,
)
def _os(host: HostFacts, want: Expectations) -> Verdict:
    found = f"{host.os_id or 'unknown'} {host.os_version or ''}".strip()
    return judged((host.os_id, host.os_version) == ("ubuntu", "24.04"), found, Status.WARN)


@check(
    "host.root",
    wanted="root, directly or through sudo",
    otherwise="fail",
    remedy="let the user run sudo, or set ssh.become and ssh.become_password",
    gpu=False,
)
def _root(host: HostFacts, want: Expectations) -> Verdict:
    return judged(host.root, "root" if host.root else "not root")


@check(
    "host.python",
    wanted="Python 3.8 or newer",
    otherwise="fail",
    remedy="apt-get install python3",
    gpu=False,
)
def _python(host: HostFacts, want: Expectations) -> Verdict:
    return judged(host.python >= (3, 8), ".".join(map(str, host.python)))


@check(
    "host.time",
    wanted="clock synchronised",
    otherwise="warn",
    remedy="timedatectl set-ntp true: rows of several hosts are ordered by time",
    gpu=False,
)
def _time(host: HostFacts, want: Expectations) -> Verdict:
    if host.ntp is None:
        return skip("timedatectl gives no answer")
    return judged(host.ntp, "synchronised" if host.ntp else "not synchronised", Status.WARN)


@check(
    "host.governor",
    wanted="CPU governor performance",
    otherwise="warn",
    remedy="set it to performance (role gpu_settings): decoding waits for the CPU between steps",
    gpu=False,
)
def _governor(host: HostFacts, want: Expectations) -> Verdict:
    if host.governor is None:
        return skip("no frequency scaling")
    return judged(host.governor == "performance", host.governor, Status.WARN)


@check(
    "host.hugepages",
    wanted="for information",
    otherwise="pass",
    remedy="nothing to do: nothing here asks for huge pages",
    gpu=False,
)
def _hugepages(host: HostFacts, want: Expectations) -> Verdict:
    return Status.PASS, "unknown" if host.hugepages is None else f"{host.hugepages} reserved"


@check(
    "host.ports",
    wanted="the services' ports free, or held by containers of ours",
    otherwise="fail",
    remedy="stop what listens there (ss -tlnp), or choose other ports in cluster.yaml",
    gpu=False,
)
def _ports(host: HostFacts, want: Expectations) -> Verdict:
    if host.listening is None:
        return skip("ss gives no answer")
    taken = sorted(host.listening & set(want.ports))
    if taken and host.containers:
        return Status.PASS, f"{numbers(taken)} in use, {len(host.containers)} containers of ours"
    return judged(not taken, f"{numbers(taken)} in use" if taken else f"{len(want.ports)} free")


@check(
    "disk.space",
    wanted="paths.min_free_gib free; 20 GiB once services of ours are there",
    otherwise="fail",
    remedy="free space, mount a larger disk, or point paths.models at one",
    gpu=False,
)
def _space(host: HostFacts, want: Expectations) -> Verdict:
    if not host.disks:
        return skip("no folder was asked about")
    wanted = DEPLOYED_FREE if host.containers else want.min_free
    path, disk = min(host.disks.items(), key=lambda item: item[1].free)
    return judged(disk.free >= wanted, f"{disk.free // GIB} GiB free for {path}, {wanted // GIB} wanted")


@check(
    "disk.filesystem",
    wanted="ext4 or xfs for weights",
    otherwise="warn",
    remedy="put paths.models on ext4 or xfs: others load weights slowly",
    gpu=False,
)
def _filesystem(host: HostFacts, want: Expectations) -> Verdict:
    kinds = {disk.fstype or "unknown" for path, disk in host.disks.items() if path == want.paths[0]}
    if not kinds:
        return skip("the folder of the models was not asked about")
    return judged(kinds <= {"ext4", "xfs"}, ", ".join(sorted(kinds)), Status.WARN)
