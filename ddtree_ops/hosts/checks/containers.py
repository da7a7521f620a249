"""Docker and what lets containers see cards."""

from __future__ import annotations

from ddtree_ops.hosts.checks.expectations import Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.checks.table import Check, Verdict, into, judged, skip
from ddtree_ops.hosts.facts import HostFacts

CHECKS: dict[str, Check] = {}
check = into(CHECKS)


@check(
    "docker.answers",
    wanted="a Docker engine that answers",
    otherwise="fail",
    remedy="install and start docker (role container_runtime)",
    gpu=False,
)
def _docker(host: HostFacts, want: Expectations) -> Verdict:
    if host.docker:
        return Status.PASS, host.docker
    return Status.FAIL, host.docker_error or "not installed"


@check(
    "docker.toolkit",
    wanted="NVIDIA's container toolkit installed",
    otherwise="fail",
    remedy="install nvidia-container-toolkit (role container_runtime)",
)
def _toolkit(host: HostFacts, want: Expectations) -> Verdict:
    return judged(host.toolkit is not None, host.toolkit or "not installed")


@check(
    "docker.runtime",
    wanted="the runtime nvidia known to docker, or a CDI specification",
    otherwise="fail",
    remedy="nvidia-ctk runtime configure --runtime=docker, then restart docker (role container_runtime)",
)
def _runtime(host: HostFacts, want: Expectations) -> Verdict:
    if not host.docker:
        return skip("docker gives no answer")
    found = [*(["runtime nvidia"] if "nvidia" in host.runtimes else []), *host.cdi]
    return judged(bool(found), ", ".join(found) or "neither")


@check(
    "docker.cdi",
    wanted="CDI specifications made for the loaded driver",
    otherwise="fail",
    remedy="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (role container_runtime)",
)
def _cdi(host: HostFacts, want: Expectations) -> Verdict:
    if not host.cdi or host.driver_loaded is None:
        return skip("no CDI specification" if not host.cdi else "no driver")
    stale = {path: versions for path, versions in host.cdi.items() if set(versions) - {host.driver_loaded}}
    found = "; ".join(f"{path}: {', '.join(versions)}" for path, versions in stale.items())
    return judged(not stale, f"{found}, loaded {host.driver_loaded}" if stale else host.driver_loaded)


@check(
    "docker.gpus",
    wanted="a container sees every GPU",
    otherwise="fail",
    remedy="restart docker after installing the toolkit; a daemon-reload can take GPUs away from containers",
)
def _container(host: HostFacts, want: Expectations) -> Verdict:
    if host.container_error is not None:
        return Status.FAIL, host.container_error[-200:]
    if host.container_gpus is None:
        return skip("the image is not on the host yet")
    return judged(host.container_gpus == len(host.gpus), f"{host.container_gpus} of {len(host.gpus)}")
