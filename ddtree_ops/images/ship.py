"""Carry an image from the host that has it to one that lacks it, through this machine, in chunks.

Nothing is written here. The target's engine checks what arrives: a tar that breaks off loads nothing.
"""

from __future__ import annotations

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.found import ImageFound
from ddtree_ops.images.events import ImageEvent, OnEvent, Step

#: Between two events.
EVERY_BYTES = 64 << 20


def ship_image(
    image: ImageFound, tag: str, source: Engine, target: Engine, *, on_event: OnEvent, timeout_s: float
) -> str:
    """Copy the image with its tag and return its id on the target. Raises DockerFailure, HostUnreachable."""
    progress = _Progress(target.host, f"{tag} from {source.host}", image.size, on_event)
    progress.say(0)
    loaded = target.load(source.save(tag, timeout_s=timeout_s), on_bytes=progress.sent, timeout_s=timeout_s)
    progress.end()
    found = target.image(tag)
    if found is None or found.labels != image.labels:
        raise DockerFailure(
            f"{target.host}: {tag} arrived as something else ({loaded[:19]})",
            remedy="try again; if it stays so, update docker on both hosts",
        )
    return found.id


class _Progress:
    def __init__(self, host: str, text: str, total: int, on_event: OnEvent) -> None:
        self._host, self._text, self._total, self._on_event = host, text, total, on_event
        self._said = self._last = 0

    def sent(self, count: int) -> None:
        self._last = count
        if count - self._said >= EVERY_BYTES:
            self._said = count
            self.say(count)

    def say(self, count: int) -> None:
        self._on_event(ImageEvent(Step.SHIP, self._host, self._text, count, max(self._total, count)))

    def end(self) -> None:
        """The tar is a little larger or smaller than the image: what was sent is then all there was."""
        self._on_event(ImageEvent(Step.SHIP, self._host, self._text, self._last, self._last))
