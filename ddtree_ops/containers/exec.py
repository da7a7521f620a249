"""A command inside a running container.

The SDK waits for its output without a timeout, on a connection that was upgraded; the call's deadline shuts
that connection down, which ends the wait like an end of the output. Only the engine knows whether it was one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_ops.redact import redact_text

if TYPE_CHECKING:
    from docker import APIClient


def run_exec(client: APIClient, name: str, argv: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of both streams, in order of arrival. Raises OSError when it is cut off."""
    identity = client.exec_create(name, list(argv))["Id"]
    output = client.exec_start(identity)
    state = client.exec_inspect(identity)
    if state["Running"] or state["ExitCode"] is None:
        raise ConnectionError("the output ended before the command")
    return int(state["ExitCode"]), redact_text(bytes(output).decode(errors="replace"))
