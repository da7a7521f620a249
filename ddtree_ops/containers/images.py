"""Images of an engine: built, pulled, saved, loaded; long work with its progress, and never half of it."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from ddtree_ops.containers.failures import DockerFailure, refused
from ddtree_ops.containers.found import ImageFound, image_found
from ddtree_ops.containers.transport import Caller
from ddtree_ops.redact import redact_text

BUILD_S = 3600.0
TRANSFER_S = 4 * 3600.0
REMOVE_S = 600.0
CHUNK_BYTES = 1 << 20
#: Of a build's output, for its error message.
TAIL_LINES = 15
#: A pull reports every layer many times a second.
PROGRESS_EVERY_S = 2.0
GIB = 1 << 30

OnLine = Callable[[str], None]
OnBytes = Callable[[int], None]


class Images(Caller):
    """The part of an engine that has to do with images."""

    def image(self, reference: str) -> ImageFound | None:
        """An image by id, tag or digest; null where there is none."""
        try:
            with self._call(f"image {reference}") as client:
                return image_found(client.inspect_image(reference))  # type: ignore[no-untyped-call]
        except DockerFailure as failure:
            if failure.status == 404:
                return None
            raise

    def images(self, label: str, *, dangling: bool | None = None) -> list[ImageFound]:
        """All images that carry a label (`KEY` or `KEY=VALUE`); only those without a tag, or with one."""
        filters = {"label": label, **({} if dangling is None else {"dangling": dangling})}
        with self._call("list of images") as client:
            ids = {str(entry["Id"]) for entry in client.images(filters=filters)}
        found = [self.image(identity) for identity in sorted(ids)]
        return [image for image in found if image is not None]

    def build(
        self,
        context: IO[bytes],
        *,
        dockerfile: str = "Dockerfile",
        tag: str | None = None,
        args: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        network: str | None = None,
        on_line: OnLine = lambda line: None,
        timeout_s: float = BUILD_S,
    ) -> str:
        """Build from a tar and return the image's id (`sha256:...`).

        args     build arguments. They stay in the image's history: never a secret
        network  of RUN steps; `host` where the engine has no bridge
        on_line  gets the build's output
        Raises DockerFailure with the end of the output, also when that ends without an image.
        """
        what = f"build of {tag or dockerfile}"
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        built = None
        with self._call(what, timeout_s) as client:
            events = client.build(
                fileobj=context,
                custom_context=True,
                dockerfile=dockerfile,
                tag=tag,
                buildargs=dict(args or {}),
                labels=dict(labels or {}),
                network_mode=network,
                rm=True,
                forcerm=True,
                decode=True,
                use_config_proxy=False,  # what is built may not depend on who builds it
            )
            for event in events:
                for line in _lines(event):
                    tail.append(line)
                    on_line(line)
                if "error" in event:
                    raise self._failed(what, event, tail)
                built = _built(event) or built
        if built is None:
            raise self._broke_off(what, "no image id", tail)
        image = self.image(built)
        if image is None:
            raise self._broke_off(what, f"the image {built} is not there", tail)
        return image.id

    def pull(
        self,
        reference: str,
        *,
        on_line: OnLine = lambda line: None,
        timeout_s: float = TRANSFER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> str:
        """Fetch `repository:tag` or `repository@sha256:...` from its registry and return the image's id."""
        from docker.utils import parse_repository_tag

        what = f"pull of {reference}"
        repository, tag = parse_repository_tag(reference)
        progress, status = _Progress(clock), ""
        with self._call(what, timeout_s) as client:
            for event in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if "error" in event:
                    raise self._failed(what, event)
                line = progress.line(event)
                if line:
                    on_line(line)
                status = str(event.get("status", "")) or status
        image = self.image(reference)
        if image is None or not status.startswith("Status:"):
            raise self._broke_off(what, f"the last word was {status!r}")
        return image.id

    def save(self, image: str, *, timeout_s: float = TRANSFER_S) -> Iterator[bytes]:
        """The image as a tar, in chunks. A tar that breaks off raises DockerFailure or HostUnreachable.

        Saved by id an image has no tag where it is loaded; saved by tag it has that.
        """
        with self._call(f"save of {image}", timeout_s) as client:
            yield from client.get_image(image, chunk_size=CHUNK_BYTES)

    def load(
        self,
        stream: Iterable[bytes],
        *,
        on_bytes: OnBytes = lambda sent: None,
        timeout_s: float = TRANSFER_S,
    ) -> str:
        """Load what `save` gave, here or on another host, and return the image's id.

        on_bytes  gets the number of bytes sent so far
        """
        what, loaded = "load of an image", None
        with self._call(what, timeout_s) as client:
            events = client.load_image(_counted(stream, on_bytes))  # type: ignore[no-untyped-call]
            for event in events:
                if "error" in event:
                    raise self._failed(what, event)
                match = re.search(r"Loaded image(?: ID)?: (\S+)", str(event.get("stream", "")))
                loaded = match.group(1) if match else loaded
        image = self.image(loaded) if loaded else None
        if image is None:
            raise self._broke_off(what, "no image id")
        return image.id

    def import_rootfs(
        self,
        stream: IO[bytes] | Iterable[bytes],
        tag: str,
        *,
        changes: Iterable[str] = (),
        timeout_s: float = TRANSFER_S,
    ) -> str:
        """Make an image of one layer from the tar of a root file system and return its id.

        changes  Dockerfile instructions (`ENV`, `ENTRYPOINT`, `LABEL`) for it
        """
        from docker.utils import parse_repository_tag

        repository, version = parse_repository_tag(tag)
        what = f"import of {tag}"
        with self._call(what, timeout_s) as client:
            answer = client.import_image_from_data(
                stream, repository=repository, tag=version or "latest", changes=list(changes)
            )
        for line in str(answer).splitlines():
            event = _event(line)
            if "error" in event:
                raise self._failed(what, event)
            if str(event.get("status", "")).startswith("sha256:"):
                return str(event["status"])
        raise self._broke_off(what, "no image id")

    def tag(self, image: str, tag: str) -> None:
        from docker.utils import parse_repository_tag

        repository, version = parse_repository_tag(tag)
        with self._call(f"tag {tag}") as client:
            client.tag(image, repository, tag=version or "latest")

    def remove_image(self, image: str) -> bool:
        """Remove a tag, or an image by its id with all its tags. False where there is none.

        Raises DockerFailure while a container uses it.
        """
        try:
            with self._call(f"removal of image {image}", REMOVE_S) as client:
                # By id the engine wants force as soon as there are two tags; it still refuses for containers
                # that run, and what uses the image is looked at here.
                if image.startswith("sha256:"):
                    self._require_unused(client, image)
                client.remove_image(image, force=image.startswith("sha256:"))
        except DockerFailure as failure:
            if failure.status == 404:
                return False
            raise
        return True

    def _require_unused(self, client: Any, image: str) -> None:
        users = client.containers(all=True, filters={"ancestor": image})
        if users:
            names = ", ".join(str(entry["Names"][0]).removeprefix("/") for entry in users)
            raise DockerFailure(
                f"{self.host}: removal of image {image}: used by {names}",
                remedy="remove what uses the image first",
                status=409,
            )

    def _failed(self, what: str, event: Mapping[str, Any], tail: Iterable[str] = ()) -> DockerFailure:
        failure = refused(self.host, what, str(event["error"]))
        lines = "".join(f"\n  {redact_text(line)}" for line in tail)
        return DockerFailure(failure.message + lines, remedy=failure.remedy)

    def _broke_off(self, what: str, why: str, tail: Iterable[str] = ()) -> DockerFailure:
        """A stream that ended properly as far as HTTP goes, and still without a result."""
        self._wire.require()
        lines = "".join(f"\n  {redact_text(line)}" for line in tail)
        return DockerFailure(
            f"{self.host}: {what}: the engine's answer broke off: {why}{lines}",
            remedy="'journalctl -u docker' on the host says why; try again",
        )


class _Progress:
    """Of a pull's many events: those that end something, and now and then how far all layers are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said = clock()
        self._layers: dict[str, tuple[int, int]] = {}

    def line(self, event: Mapping[str, Any]) -> str | None:
        status, layer = str(event.get("status", "")), str(event.get("id", ""))
        detail = event.get("progressDetail") or {}
        if not detail.get("total"):
            return f"{layer}: {status}" if layer else status or None
        if status != "Downloading":
            return None
        self._layers[layer] = (int(detail.get("current") or 0), int(detail["total"]))
        if self._clock() - self._said < PROGRESS_EVERY_S:
            return None
        self._said = self._clock()
        done, total = (sum(pair[index] for pair in self._layers.values()) / GIB for index in (0, 1))
        return f"downloaded {done:.2f} of {total:.2f} GiB in {len(self._layers)} layers so far"


def _counted(stream: Iterable[bytes], on_bytes: OnBytes) -> Iterator[bytes]:
    sent = 0
    for chunk in stream:
        yield chunk
        sent += len(chunk)
        on_bytes(sent)


def _lines(event: Mapping[str, Any]) -> list[str]:
    text = str(event.get("stream") or event.get("status") or "")
    return [line for line in text.splitlines() if line.strip()]


def _built(event: Mapping[str, Any]) -> str | None:
    aux = event.get("aux")
    if isinstance(aux, Mapping) and aux.get("ID"):
        return str(aux["ID"])
    match = re.search(r"Successfully built ([0-9a-f]+)", str(event.get("stream", "")))
    return match.group(1) if match else None


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
