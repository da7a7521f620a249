"""What a check found, and how bad it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """What one check found on one host."""

    id: str
    host: str
    status: Status
    found: str
    remedy: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "host": self.host,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }


def unreachable_host(host: str, reason: str) -> Finding:
    """A host that cannot be reached or read is not a host that is down: nothing follows from it but this."""
    remedy = f"ssh to {host} by hand: address, key, known_hosts, firewall, sudo (ssh.become), python3"
    return Finding("host.reachable", host, Status.FAIL, reason, remedy)


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status; skips do not count."""
    present = {finding.status for finding in findings}
    return next((status for status in (Status.FAIL, Status.WARN) if status in present), Status.PASS)
