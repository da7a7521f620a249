"""Requests that a mode cannot serve right are refused with a 400 and a reason."""

from __future__ import annotations

from typing import Any

from ddtree_engine.sglang_plugin.config import Config, Mode
from ddtree_engine.sglang_plugin.names import ALGORITHM

CUSTOM_KEYS = ("ddtree_budget", "ddtree_builder", "ddtree_return_steps")


def refusal(request: Any, config: Config) -> str | None:
    """Why this `Req` cannot be served in this mode, or None."""
    parameters = request.sampling_params
    if getattr(request, "return_hidden_states", False):
        return f"return_hidden_states: found true, allowed with {ALGORITHM} is false"
    custom = getattr(parameters, "custom_params", None)
    for key in CUSTOM_KEYS:
        if isinstance(custom, dict) and key in custom:
            return (
                f"custom_params.{key}: found {custom[key]!r}, allowed is nothing: this server's tree is "
                "fixed at start (--speculative-num-draft-tokens)"
            )
    if config.mode is Mode.SHADOW:
        return None
    if getattr(request, "return_sampling_mask", False):
        return f"return_sampling_mask: found true, allowed with {ALGORITHM} is false"
    if getattr(request, "custom_logit_processor", None):
        return f"custom_logit_processor: found one, allowed with {ALGORITHM} is none (nodes share no prefix)"
    return None
