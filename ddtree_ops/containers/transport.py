"""One call to an engine: its deadline, and what its errors mean."""

from __future__ import annotations

import http.client
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddtree_ops.containers.failures import DockerFailure, HostUnreachable, refused
from ddtree_ops.errors import BadEnvironment, DdtreeError

if TYPE_CHECKING:
    from docker import APIClient

    from ddtree_ops.containers import sdk

#: What an engine may take for an answer that costs it nothing.
QUICK_S = 30.0


class Wire(Protocol):
    """The way to an engine's socket."""

    @property
    def name(self) -> str:
        """The host's, for messages."""
        ...

    def socket(self) -> Path:
        """A Unix socket of this machine that leads to the engine. Raises HostUnreachable."""
        ...

    def require(self) -> None:
        """Raise HostUnreachable unless the host answers now."""
        ...

    def trouble(self) -> DockerFailure | None:
        """Why the engine's socket gives no answer although the host does; null where it looks right."""
        ...


class Caller:
    """Makes calls over a wire, each on a connection of its own. Safe for several threads."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._version: str | None = None
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        return self._wire.name

    @contextmanager
    def _call(self, what: str, seconds: float | None = QUICK_S) -> Iterator[APIClient]:
        """A client for one call, cut off after `seconds` (null: never).

        what  the call in words, for messages: `start of lab-dflash-0`
        Raises HostUnreachable, DockerFailure, BadEnvironment.
        """
        _require_sdk()
        from ddtree_ops.containers import sdk

        path = self._wire.socket()
        deadline = sdk.Deadline(seconds)
        try:
            with self._translated(what, deadline):
                client = sdk.open_client(path, self._negotiated(path, deadline), deadline)
                try:
                    yield client
                    if deadline.broken:
                        raise ConnectionError("an answer broke off")
                finally:
                    with suppress(OSError):
                        client.close()
        finally:
            deadline.close()

    def _negotiated(self, path: Path, deadline: sdk.Deadline) -> str:
        from ddtree_ops.containers import sdk

        with self._lock:
            if self._version is None:
                self._version = sdk.server_version(path, deadline)
            return self._version

    @contextmanager
    def _translated(self, what: str, deadline: sdk.Deadline) -> Iterator[None]:
        import docker.errors
        import requests
        import urllib3

        try:
            yield
        except DdtreeError:
            raise
        except docker.errors.APIError as error:
            status = error.response.status_code if error.response is not None else None
            raise refused(self.host, what, str(error.explanation or error), status) from error
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            http.client.HTTPException,
            docker.errors.DockerException,
            OSError,
            ValueError,  # an answer that is no JSON, or a chunk without its length
        ) as error:
            raise self._broken(what, error, deadline) from error

    def _broken(self, what: str, error: Exception, deadline: sdk.Deadline) -> DdtreeError:
        """What a connection that gave no proper answer means: no host, too slow, no engine, or cut short."""
        try:
            self._wire.require()
        except HostUnreachable as gone:
            return HostUnreachable(f"{gone.message} (during {what})", remedy=gone.remedy)
        if deadline.expired:
            return DockerFailure(
                f"{self.host}: {what}: the engine gave no answer in {deadline.seconds:g} s",
                remedy="look at the host's load, and at 'journalctl -u docker' there",
                timed_out=True,
            )
        return self._wire.trouble() or DockerFailure(
            f"{self.host}: {what}: the engine's answer broke off ({type(error).__name__})",
            remedy="'journalctl -u docker' on the host says why; try again",
        )


def _require_sdk() -> None:
    """The base install does not bring Docker's SDK."""
    if importlib.util.find_spec("docker") is None:
        raise BadEnvironment(
            "Docker's SDK for Python is not installed", remedy="pip install 'ddtree[deploy]'"
        )
