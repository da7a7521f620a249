"""What a client may ask for, checked field by field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_engine.reference.errors import RequestError
from ddtree_engine.reference.sampling import GREEDY_BELOW, Sampler
from ddtree_engine.tree import Builder

MAX_BUDGET = 127
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 128
DEFAULT_MAX_NEW_TOKENS = 128
TOP_K_ALL = 1 << 30

# Parameters of SGLang that this engine does not implement, with the value that means "not used".
UNUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "beam_width": (1, None),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "stop_regex": (None, "", []),
    "logit_bias": (None, {}),
    "watermark": (None,),
}
# Accepted and without effect here.
HARMLESS = ("spaces_between_special_tokens", "stream_interval")
CUSTOM = ("ddtree_budget", "ddtree_builder", "ddtree_return_steps")


@dataclass(frozen=True)
class Limits:
    """What the engine at hand allows: `per_request` is False for arms without a tree."""

    context_length: int
    vocab_size: int
    arm: str
    per_request: bool
    default_budget: int | None
    default_builder: Builder | None
    calibrated: bool
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request."""

    rid: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampler: Sampler
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    budget: int | None = None
    builder: Builder | None = None
    return_steps: bool = False
    return_logprob: bool = False
    top_logprobs: int = 0
    logprob_start: int | None = None
    text_in_logprobs: bool = False
    stream: bool = False


def parse_request(
    prompt_ids: Sequence[int],
    params: Mapping[str, Any],
    limits: Limits,
    *,
    rid: Any = None,
    stream: Any = False,
    return_logprob: Any = False,
    top_logprobs: Any = 0,
    logprob_start: Any = -1,
    text_in_logprobs: Any = False,
) -> GenerateRequest:
    """Check a request's parameters. Raises `RequestError` naming field, found and allowed."""
    read = _Fields(params, "sampling_params")
    read.known_only()
    custom = read.value("custom_params", {})
    if not isinstance(custom, Mapping):
        raise read.wrong("custom_params", custom, "an object")
    budget, builder, return_steps = _custom(custom, limits)
    prompt_ids = _prompt(prompt_ids, limits)
    room = limits.context_length - len(prompt_ids)
    asked = read.value("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, none_ok=True)
    # As SGLang: null means up to the context's end.
    max_new_tokens = room if asked is None else read.integer("max_new_tokens", asked, 0, None)
    if max_new_tokens > room:
        raise read.wrong(
            "max_new_tokens",
            asked,
            f"at most {room}: the prompt has {len(prompt_ids)} tokens, the context {limits.context_length}",
        )
    count = _Fields({}, "").integer("top_logprobs_num", top_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    start = _Fields({}, "").integer(
        "logprob_start_len", -1 if logprob_start is None else logprob_start, -1, None
    )
    if rid is not None and (not isinstance(rid, str) or not rid):
        raise _Fields({}, "").wrong("rid", rid, "a string")
    return GenerateRequest(
        rid=rid or secrets.token_hex(16),
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=max_new_tokens,
        sampler=_sampler(read),
        stop=_stop_strings(read),
        stop_ids=_stop_ids(read, limits),
        skip_special_tokens=read.flag("skip_special_tokens", True),
        no_stop_trim=read.flag("no_stop_trim", False),
        budget=budget,
        builder=builder,
        return_steps=return_steps,
        return_logprob=_Fields({"return_logprob": return_logprob}, "").flag("return_logprob", False),
        top_logprobs=count,
        logprob_start=start if 0 <= start < len(prompt_ids) else None,
        text_in_logprobs=_Fields({"return_text_in_logprobs": text_in_logprobs}, "").flag(
            "return_text_in_logprobs", False
        ),
        stream=_Fields({"stream": stream}, "").flag("stream", False),
    )


def _prompt(ids: Sequence[int], limits: Limits) -> Sequence[int]:
    if not ids:
        raise RequestError("input_ids: found no token, allowed is a prompt of one token or more", "input_ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"input_ids: found {token!r}, allowed are token ids in [0, {limits.vocab_size - 1}]",
                "input_ids",
            )
    if len(ids) >= limits.context_length:
        raise RequestError(
            f"input_ids: found {len(ids)} tokens, allowed are at most {limits.context_length - 1}",
            "input_ids",
        )
    return ids


def _custom(custom: Mapping[str, Any], limits: Limits) -> tuple[int | None, Builder | None, bool]:
    read = _Fields(custom, "custom_params")
    for key in custom:
        if key not in CUSTOM:
            raise read.wrong(key, custom[key], "only " + ", ".join(CUSTOM))
    return_steps = read.flag("ddtree_return_steps", False)
    budget, builder = limits.default_budget, limits.default_builder
    for key in ("ddtree_budget", "ddtree_builder"):
        if custom.get(key) is not None and not limits.per_request:
            raise read.wrong(key, custom[key], f"nothing: arm {limits.arm!r} builds no tree")
    if custom.get("ddtree_budget") is not None:
        budget = read.integer("ddtree_budget", custom["ddtree_budget"], 1, MAX_BUDGET)
    if custom.get("ddtree_builder") is not None:
        names = [b.value for b in Builder if b is not Builder.CALIBRATED or limits.calibrated]
        if custom["ddtree_builder"] not in names:
            raise read.wrong("ddtree_builder", custom["ddtree_builder"], " or ".join(names))
        builder = Builder(custom["ddtree_builder"])
    return budget, builder, return_steps


def _sampler(read: _Fields) -> Sampler:
    temperature = read.number("temperature", 1.0, 0.0, math.inf)
    top_k = read.integer("top_k", read.value("top_k", -1), -1, TOP_K_ALL)
    if top_k == 0:
        raise read.wrong("top_k", 0, "-1 (whole vocabulary) or a whole number >= 1")
    top_p = read.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise read.wrong("top_p", 0.0, "a number in (0, 1]")
    seed = read.value("sampling_seed", None, none_ok=True)
    if seed is not None:
        seed = read.integer("sampling_seed", seed, -(2**63), 2**63 - 1)
    return Sampler(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k in (-1, TOP_K_ALL) else top_k,
        top_p=top_p,
        min_p=read.number("min_p", 0.0, 0.0, 1.0),
        seed=secrets.randbits(63) if seed is None else seed,
    )


def _stop_strings(read: _Fields) -> tuple[str, ...]:
    stop = read.value("stop", None, none_ok=True)
    listed = (
        [stop]
        if isinstance(stop, str)
        else list(stop)
        if isinstance(stop, list)
        else []
        if stop is None
        else [None]
    )
    if len(listed) > MAX_STOPS or not all(isinstance(entry, str) and entry for entry in listed):
        raise read.wrong("stop", stop, f"a string or at most {MAX_STOPS} of them, none empty")
    return tuple(listed)


def _stop_ids(read: _Fields, limits: Limits) -> frozenset[int]:
    found = read.value("stop_token_ids", None, none_ok=True) or []
    fits = isinstance(found, list) and all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < limits.vocab_size
        for token in found
    )
    if not fits:
        raise read.wrong("stop_token_ids", found, f"a list of token ids in [0, {limits.vocab_size - 1}]")
    eos = frozenset() if read.flag("ignore_eos", False) else limits.eos_ids
    return eos | frozenset(found)


@dataclass(frozen=True)
class _Fields:
    """Readers of one JSON object whose errors name the field."""

    data: Mapping[str, Any]
    source: str

    def known_only(self) -> None:
        known = {
            "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "sampling_seed", "stop",
            "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "custom_params",
            *UNUSED, *HARMLESS,
        }  # fmt: skip
        for key, value in self.data.items():
            if key not in known:
                raise self.wrong(key, value, "only " + ", ".join(sorted(known - set(UNUSED))))
            if key in UNUSED and value not in UNUSED[key]:
                raise self.wrong(key, value, f"{UNUSED[key][0]!r}: not implemented by the reference engine")

    def wrong(self, key: str, found: object, allowed: str) -> RequestError:
        name = f"{self.source}.{key}" if self.source else key
        return RequestError(f"{name}: found {found!r}, allowed is {allowed}", name)

    def value(self, key: str, default: Any, none_ok: bool = False) -> Any:
        if key not in self.data:
            return default
        value = self.data[key]
        return default if value is None and not none_ok else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def integer(self, key: str, value: Any, least: int, most: int | None) -> int:
        fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits or value < least or (most is not None and value > most):
            allowed = f"a whole number >= {least}" if most is None else f"a whole number in [{least}, {most}]"
            raise self.wrong(key, value, allowed)
        return int(value)

    def number(self, key: str, default: float, least: float, most: float) -> float:
        value = self.value(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not least <= value <= most:
            allowed = (
                f"a finite number >= {least:g}" if math.isinf(most) else f"a number in [{least:g}, {most:g}]"
            )
            raise self.wrong(key, value, allowed)
        return float(value)
