"""What happens while images are made ready, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Step(StrEnum):
    BASE = "base"  # which base, by digest; pulling it
    PACKAGES = "packages"
    BUILD = "build"
    SHIP = "ship"
    PRESENT = "present"
    CLEAN = "clean"


@dataclass(frozen=True)
class ImageEvent:
    """`done` and `total` are bytes, where the step has a size; `total` is an estimate."""

    step: Step
    host: str
    text: str
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        text = f"{self.host}: {self.step.value}: {self.text}"
        if self.done is None or not self.total:
            return text
        return f"{text}, {self.done / MIB:.0f} of {self.total / MIB:.0f} MiB"


OnEvent = Callable[[ImageEvent], None]


def ignore(event: ImageEvent) -> None:
    """For callers that show nothing."""
