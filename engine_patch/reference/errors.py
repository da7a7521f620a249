"""What can go wrong, and with which exit code or HTTP status it ends."""

from __future__ import annotations


class EngineError(Exception):
    """A failure with a one-line message for the operator."""

    exit_code = 1


class InputError(EngineError):
    """Options, a checkpoint or a config that cannot be served."""

    exit_code = 2


class EnvironmentFault(EngineError):
    """The machine is not fit for the job."""

    exit_code = 3


class SelfCheckError(EngineError):
    """The start-up self-check found wrong numbers."""


class RequestError(Exception):
    """A request that cannot be served; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class QueueFullError(Exception):
    """More requests are waiting than the queue holds."""


class DrainingError(Exception):
    """The server is shutting down and takes no new work."""
