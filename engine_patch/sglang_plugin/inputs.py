"""The two inputs that travel with a batch: the drafter's state between steps and the tree to verify."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ddtree_engine.sglang_plugin.penalties import StepPenalties
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):  # type: ignore[misc]
    """A tree of Q nodes per request; its type is how hooks know that a verify pass is ours.

    penalties  None when no request of the batch asks for any
    """

    penalties: StepPenalties | None = None


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):  # type: ignore[misc]
    """The bonus token and length that a step hands to the next one."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve the step's KV slots."""
        with _reserving_for_drafter():
            super().prepare_for_decode(batch)


def draft_input(bonus_tokens: Tensor, new_seq_lens: Tensor) -> DDTreeDraftInput:
    """int[N] each -> the next step's input."""
    empty = bonus_tokens.new_empty((bonus_tokens.numel(), 0))
    return DDTreeDraftInput(
        topk_p=empty.float(),
        topk_index=empty.long(),
        bonus_tokens=bonus_tokens.long(),
        new_seq_lens=new_seq_lens.long(),
        hidden_states=empty.half(),
    )


def reserved_tokens() -> int:
    """Slots reserved per request and step: two windows, so that the scheduler may run one step ahead."""
    spec = get_spec()
    return 2 * max(int(spec.speculative_num_draft_tokens), int(spec.speculative_dflash_block_size))


def _reserving_for_drafter() -> Any:
    # The reservation is sized by the verify width; the drafter's block may be wider.
    spec = get_spec()
    block = int(spec.speculative_dflash_block_size)
    if block <= int(spec.speculative_num_draft_tokens):
        return nullcontext()
    return spec.override(speculative_num_draft_tokens=block)
