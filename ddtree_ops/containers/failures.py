"""What can go wrong between here and a container, kept apart: no host, no engine, or an engine that says no.

The difference matters more than the message: a host that cannot be reached says nothing about its containers,
so nobody may conclude that they are down.
"""

from __future__ import annotations

import re

from ddtree_ops.errors import DdtreeError, JobFailed
from ddtree_ops.redact import plain_text, redact_text


class HostUnreachable(DdtreeError):
    """SSH is gone: nothing is known about the host. Never means that a container is down."""


class DockerFailure(JobFailed):
    """The engine answered with an error, or is not there although its host is. Its text has no colours.

    status     the HTTP status of the answer; null where there was none
    timed_out  the engine took longer than the call may take
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        status: int | None = None,
        timed_out: bool = False,
    ) -> None:
        super().__init__(plain_text(message), remedy=remedy)
        self.status = status
        self.timed_out = timed_out


def refused(host: str, what: str, text: str, status: int | None = None) -> DockerFailure:
    """The engine's own error, with what to do about it where that is known."""
    said = " ".join(redact_text(text).split())[:1000] or f"HTTP {status}"
    return DockerFailure(f"{host}: {what}: {said}", remedy=remedy_for(said), status=status)


def remedy_for(text: str) -> str | None:
    """One line for what the engine says, or null."""
    return next((remedy for pattern, remedy in _REMEDIES if pattern.search(text)), None)


_REMEDIES = [
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
        (
            r"could not select device driver|unknown or invalid runtime name: nvidia",
            "the engine has no NVIDIA runtime: install nvidia-container-toolkit, run "
            "'nvidia-ctk runtime configure --runtime=docker' and restart docker (the role container_runtime "
            "does)",
        ),
        (
            r"nvidia-container-cli|nvidia-container-runtime|unresolvable CDI devices",
            "the host's driver and its container toolkit do not agree: compare 'nvidia-smi -L' with the "
            "GPUs asked for; after a driver change reboot, or regenerate the CDI specification",
        ),
        (
            r"no space left on device",
            "free space where docker keeps its data ('docker system df' on the host says what takes it)",
        ),
        (
            r"address already in use|port is already allocated",
            "something listens on that port: 'ss -ltnp' on the host names it; stop it or choose another port",
        ),
        (
            r"no such image|image .*not found|manifest unknown|manifest for .* not found",
            "the image is not on this host: build or ship it again",
        ),
        (
            r"pull access denied|unauthorized|no basic auth credentials",
            "log in to the registry ('docker login') or check the image's name",
        ),
        (r"toomanyrequests", "the registry limits pulls: log in, or wait and try again"),
        (r"bind source path does not exist", "make that folder on the host (the role service_host does)"),
        (r"container name .* is already in use", "another container has that name: remove or rename it"),
        (r"error setting rlimit", "this engine may not raise that limit: change the service's ulimits"),
        (r"executable file not found|no such file or directory: unknown", "the image has no such program"),
        (r"no such container", "list what is there with 'ddtree deploy status'"),
        (r"image is being used|image has dependent child images", "remove what uses the image first"),
        (r"dial tcp|i/o timeout|tls handshake|x509", "check the host's network, proxy and certificates"),
    )
]
