"""`DFlashDraftModel` of SGLang 0.5.23 that can load a bed."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_engine.bed.folders import KEY
from ddtree_engine.bed.loading import wide_weights
from sglang.srt.models import dflash
from torch import Tensor


class DFlashDraftModel(dflash.DFlashDraftModel):  # type: ignore[misc]
    """The drafter, wide or as its checkpoint has it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Through SGLang's loaders."""
        data = getattr(self.config, KEY, None)
        super().load_weights(weights if data is None else wide_weights(data, weights, self))


EntryClass = DFlashDraftModel
