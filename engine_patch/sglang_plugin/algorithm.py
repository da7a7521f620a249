"""DDTREE as SGLang's scheduler sees it."""

from __future__ import annotations

import logging
import os
from typing import Any

from ddtree_engine.sglang_plugin import arguments, pin
from ddtree_engine.sglang_plugin.config import load_config
from ddtree_engine.sglang_plugin.names import MARKER
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

logger = logging.getLogger(__name__)

NATIVE_MOVE = "SGLANG_NATIVE_MOVE_KV_CACHE"


class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """A member of the DFlash family whose target verifies a tree.

    The family's answers make SGLang capture auxiliary hidden states, size the drafter's KV cache and build
    the drafter's graphs. Three methods that SGLang calls on any algorithm are missing in its base class.
    """

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        """As DFLASH in shadow mode; a tree's commit still reads what prefill shares."""
        return not load_config().verifies_tree

    def has_draft_kv(self) -> bool:
        """Drafting writes no KV of its own, so no page is reserved per branch."""
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """F rows a request for the drafter, Q for the target."""
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size) if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        """Check and complete the arguments. Raises `PluginError`."""
        overridden = pin.require_pinned()
        config = load_config()
        around = arguments.survey(server_args, config, card_bytes())
        fields = arguments.resolve(server_args, config, around)
        for name, value in fields.items():
            setattr(server_args, name, value)
        logger.info("%s: mode=%s state=%s arguments=%s", MARKER, config.mode, config.state, fields)
        for mismatch in overridden:
            logger.warning("%s: running on an SGLang that it was not written against: %s", MARKER, mismatch)

    def create_worker(self, server_args: Any) -> type:
        """The worker class; runs in the scheduler process, before pools and graphs exist."""
        from ddtree_engine.sglang_plugin import hooks

        if load_config().verifies_tree:
            # SGLang's fused move reads and writes rows of one program without a barrier between them, and an
            # accepted path's slots are both: path 0, 2, 3 moves 2 to 1 and 3 to 2. Indexing reads first.
            os.environ.setdefault(NATIVE_MOVE, "1")
        hooks.install()
        worker: type = super().create_worker(server_args)
        return worker


def worker_class(server_args: Any) -> type:
    """Registered as the algorithm's factory: the import is left to the scheduler process."""
    from ddtree_engine.sglang_plugin.worker import DDTreeWorkerV2

    return DDTreeWorkerV2


def card_bytes() -> int:
    """Memory of the first card, 0 when torch sees none."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0
