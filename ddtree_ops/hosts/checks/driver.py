"""The driver: branch, module, versions, the CUDA that it allows."""

from __future__ import annotations

from ddtree_ops.hosts.checks.expectations import Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.checks.table import Check, Verdict, into, judged, skip
from ddtree_ops.hosts.facts import HostFacts

CHECKS: dict[str, Check] = {}
check = into(CHECKS)


@check(
    "driver.answers",
    wanted="nvidia-smi answers",
    otherwise="fail",
    remedy="install the driver (role nvidia_driver), reboot after an update; if it hangs, see dmesg for Xid",
)
def _answers(host: HostFacts, want: Expectations) -> Verdict:
    found = host.smi_error or f"driver {host.driver}"
    return judged(host.smi_error is None, found)


@check(
    "driver.branch",
    wanted="the branch of cluster.yaml, 580 or newer",
    otherwise="fail",
    remedy="install the wanted branch (role nvidia_driver) and reboot",
)
def _branch(host: HostFacts, want: Expectations) -> Verdict:
    version = host.driver_loaded or host.driver or host.driver_installed
    if version is None:
        return Status.FAIL, "no driver"
    return judged(int(version.split(".")[0]) >= want.branch, f"{version}, {want.branch} or newer wanted")


@check(
    "driver.open",
    wanted="open kernel modules",
    otherwise="fail",
    remedy="replace the proprietary module by the -open packages: Blackwell cards work with no other",
)
def _open(host: HostFacts, want: Expectations) -> Verdict:
    if host.driver_open is None:
        return Status.FAIL, "no module"
    return judged(host.driver_open, "open" if host.driver_open else "proprietary")


@check(
    "driver.nouveau",
    wanted="nouveau not loaded",
    otherwise="fail",
    remedy="blacklist nouveau (role nvidia_driver), update the initramfs, reboot",
)
def _nouveau(host: HostFacts, want: Expectations) -> Verdict:
    loaded = "nouveau" in host.modules
    return judged(not loaded, "loaded" if loaded else "not loaded")


@check(
    "driver.versions",
    wanted="the loaded module is the installed one",
    otherwise="fail",
    remedy="reboot: the driver was updated under the loaded module",
)
def _versions(host: HostFacts, want: Expectations) -> Verdict:
    if host.driver_loaded is None or host.driver_installed is None:
        return skip("loaded or installed version unknown")
    same = host.driver_loaded == host.driver_installed
    return judged(same, f"loaded {host.driver_loaded}, installed {host.driver_installed}")


@check(
    "driver.held",
    wanted="the driver's packages held, so that no unattended upgrade changes them",
    otherwise="warn",
    remedy="apt-mark hold the driver's packages (role nvidia_driver)",
)
def _held(host: HostFacts, want: Expectations) -> Verdict:
    if host.held is None:
        return skip("apt-mark gives no answer")
    held = [name for name in host.held if name.startswith(("nvidia-", "libnvidia-", "linux-modules-nvidia-"))]
    return judged(bool(held), f"{len(held)} packages held", Status.WARN)


@check(
    "driver.cuda",
    wanted="the image's CUDA version is at most the driver's",
    otherwise="fail",
    remedy="update the driver, or choose an image with an older CUDA: error 804 is what comes otherwise",
)
def _cuda(host: HostFacts, want: Expectations) -> Verdict:
    if host.cuda is None:
        return skip("the driver's CUDA version is unknown")
    good = _dotted(want.cuda) <= _dotted(host.cuda)
    return judged(good, f"image {want.cuda}, driver up to {host.cuda}")


def _dotted(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
