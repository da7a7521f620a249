"""What a request asks of its tree; what a mode cannot serve right is refused with a 400 and a reason."""

from __future__ import annotations

from typing import Any

from ddtree_engine.sglang_plugin.config import AUTO, VARIABLE, Config, Mode
from ddtree_engine.sglang_plugin.names import ALGORITHM
from ddtree_engine.sglang_plugin.penalties import asked

BUDGET = "ddtree_budget"
CUSTOM_KEYS = (BUDGET, "ddtree_builder", "ddtree_return_steps")


def refusal(request: Any, config: Config) -> str | None:
    """Why this `Req` cannot be served in this mode, or None."""
    parameters = request.sampling_params
    if getattr(request, "return_hidden_states", False):
        return f"return_hidden_states: found true, allowed with {ALGORITHM} is false"
    custom = getattr(parameters, "custom_params", None)
    for key in CUSTOM_KEYS:
        if isinstance(custom, dict) and key in custom:
            if key == BUDGET and config.widths:
                if (wrong := _budget_refusal(custom[key], config)) is not None:
                    return wrong
                continue
            return (
                f"custom_params.{key}: found {custom[key]!r}, allowed is nothing: this server's tree is "
                f"fixed at start ({_fixed_by(config)})"
            )
    if config.mode is Mode.SHADOW:
        return _ignored_refusal(request)
    if getattr(request, "return_sampling_mask", False):
        return f"return_sampling_mask: found true, allowed with {ALGORITHM} is false"
    if getattr(request, "custom_logit_processor", None):
        return f"custom_logit_processor: found one, allowed with {ALGORITHM} is none (nodes share no prefix)"
    return None


def asked_budget(request: Any) -> Any:
    """What an admitted `Req` asks for: a budget, auto, or None."""
    custom = getattr(request.sampling_params, "custom_params", None)
    return custom.get(BUDGET) if isinstance(custom, dict) else None


def _ignored_refusal(request: Any) -> str | None:
    for name, value in asked(request).named.items():
        allowed = 1 if name == "repetition_penalty" else 0
        return (
            f"{name}: found {value}, allowed in mode {Mode.SHADOW} is {allowed}: DFLASH, which serves there, "
            "ignores it without a word"
        )
    return None


def _budget_refusal(found: Any, config: Config) -> str | None:
    if type(found) is int and found in config.budgets:
        return None
    if found == AUTO and config.costs is not None:
        return None
    named = ", ".join(map(str, config.budgets)) + (f", {AUTO}" if config.costs is not None else "")
    return f"custom_params.{BUDGET}: found {found!r}, allowed are {named}: what this server has captured"


def _fixed_by(config: Config) -> str:
    return VARIABLE if config.widths else "--speculative-num-draft-tokens"
