"""``images.lock.json``: which images a cluster runs, by digest, and what they were made of.

One is shipped with ddtree (`dockerfiles/images.lock.json`) with what is known of the bases. The one that
counts lies beside cluster.yaml and is written by `ddtree deploy up`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ddtree_ops.schemas.sweep import StrictModel

LOCK_SCHEMA = 1

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Cuda = Annotated[str, Field(pattern=r"^\d{2}\.\d$")]
Text = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f]+$")]


class LockedBase(StrictModel):
    """A base image. With `id` instead of `digest` it came from no registry, so nobody else can pull it."""

    name: Text = Field(description="as in image.base of cluster.yaml")
    digest: Digest | None = Field(None, description="of the registry's manifest; null: not resolved yet")
    id: Digest | None = Field(None, description="of an image that only the hosts have")
    cuda: Cuda | None = None
    note: Text | None = None


class LockedImage(StrictModel):
    """An image that was built here."""

    tag: Text
    id: Digest
    context_hash: Sha256 = Field(description="of everything that went in; also its label")
    base: Text
    base_digest: Digest
    cuda: Cuda | None = None
    wheel_sha256: Sha256 | None = Field(None, description="of ddtree's own wheel, where that is in it")
    version: Text | None = Field(None, description="of ddtree")
    built_at: Text = Field(description="UTC, ISO 8601")


class ImagesLock(StrictModel):
    schema_version: Literal[1] = Field(1, alias="schema")
    kind: Literal["ddtree-images"] = "ddtree-images"
    bases: list[LockedBase] = Field([])
    images: list[LockedImage] = Field([], description="the newest first")

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        for key, names in (
            ("bases", [base.name for base in self.bases]),
            ("images", [image.tag for image in self.images]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise ValueError(f"{key}.{index}: found {name!r} again, allowed: each once")
        return self
