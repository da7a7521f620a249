"""The kinds of values that several parts of cluster.yaml share."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="lower case, digits, dashes")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$")]
RemotePath = Annotated[
    str, Field(pattern=r"^/[^\x00-\x1f]*$", max_length=255, description="absolute, on a host")
]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]
Port = Annotated[int, Field(strict=True, ge=1024, le=65535)]
Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


def an_address(value: str) -> str:
    """The IP address as it was written. Raises ValueError for anything else."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError("an IP address of the host, such as 127.0.0.1") from None
    return value


Address = Annotated[Text, AfterValidator(an_address)]


def holder(taken: Mapping[tuple[str | None, int], str], host: str | None, number: int) -> str | None:
    """Who has the port or GPU on the host already; the host null stands for all hosts."""
    if host is None:
        return next((name for (_, other), name in taken.items() if other == number), None)
    return taken.get((host, number)) or taken.get((None, number))
