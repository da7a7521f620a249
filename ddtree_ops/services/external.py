"""Services that somebody else started and will stop."""

from __future__ import annotations

from pathlib import Path

from ddtree_ops.services.base import ServiceSpec


class ExternalService:
    """A running server behind the common interface. Never started, never stopped."""

    def __init__(self, spec: ServiceSpec) -> None:
        if spec.url is None:
            raise ValueError(f"service {spec.name}: an external service needs its url")
        self.spec = spec
        self._url = spec.url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    @property
    def log_path(self) -> Path | None:
        return None

    def start(self) -> None:
        return None

    def alive(self) -> bool:
        return True

    def exit_code(self) -> int | None:
        return None

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def stop(self) -> None:
        return None


class ExternalLauncher:
    def create(self, spec: ServiceSpec) -> ExternalService:
        return ExternalService(spec)
