"""`Qwen3_5ForCausalLM` of SGLang 0.5.23 that can load a bed."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_engine.bed.folders import KEY
from ddtree_engine.bed.loading import wide_weights
from sglang.srt.models import qwen3_5_text
from torch import Tensor


class Qwen3_5ForCausalLM(qwen3_5_text.Qwen3_5ForCausalLM):  # type: ignore[misc]  # noqa: N801 - SGLang's name
    """The text model, wide or as its checkpoint has it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Through SGLang's loaders, which know its fused layouts, ranks and cached norm weights."""
        data = getattr(self.config, KEY, None)
        tensors = weights if data is None else wide_weights(data, weights, self)
        loaded: set[str] = super().load_weights(tensors)
        # With FP8 layers have their cache's scales as well, which checkpoints need not name.
        asked = {name for name, _ in self.named_parameters() if not name.endswith((".k_scale", ".v_scale"))}
        missing = sorted(asked - loaded)
        if data is not None and missing:
            raise ValueError(f"bed: {missing[0]} and {len(missing) - 1} more parameters were not loaded")
        return loaded


EntryClass = Qwen3_5ForCausalLM
