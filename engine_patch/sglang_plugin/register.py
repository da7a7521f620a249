"""The entry point `sglang.srt.plugins`: runs once in every process of a server.

SGLang logs and swallows what a plugin raises, so everything that can be wrong with the release or the
configuration is checked later, when the algorithm is asked for: there an error stops the server.
"""

from __future__ import annotations

import importlib.metadata
import logging

from ddtree_engine.sglang_plugin.names import ALGORITHM, FALLBACK_ALGORITHM, MARKER

logger = logging.getLogger(__name__)


def register() -> str:
    """Register the algorithm and return the name that it got."""
    from ddtree_engine.sglang_plugin import arguments, hooks
    from ddtree_engine.sglang_plugin.algorithm import DDTreeAlgorithm, worker_class
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    name = FALLBACK_ALGORITHM if ALGORITHM in SpeculativeAlgorithm.__members__ else ALGORITHM
    SpeculativeAlgorithm.register(
        name,
        supports_overlap=True,
        # Runs before SGLang quietly turns off what an algorithm of its own does not support.
        validate_server_args=arguments.refuse_unsupported,
        spec_class=DDTreeAlgorithm,
    )(worker_class)
    HookRegistry.register(hooks.SERVER_INFO, hooks.add_facts, HookType.AFTER)
    HookRegistry.register(hooks.REDACT, hooks.hide_keys, HookType.AFTER)
    logger.info("%s %s: registered as %s", MARKER, importlib.metadata.version("ddtree"), name)
    return name
