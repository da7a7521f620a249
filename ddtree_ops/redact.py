"""What of a server's answer may be stored: an allow-list, since `/server_info` carries keys and tokens in
clear.

Logs have no fields to choose from, so their tails lose whatever looks like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Top-level fields of `/server_info` that are kept. Everything else is dropped, known or not.
SERVER_INFO_FIELDS = frozenset(
    {
        "attention_backend",
        "chunked_prefill_size",
        "context_length",
        "cuda_graph_max_bs",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "dtype",
        "enable_deterministic_inference",
        "kv_cache_dtype",
        "linear_attn_backend",
        "mamba_radix_cache_strategy",
        "max_running_requests",
        "max_total_num_tokens",
        "mem_fraction_static",
        "page_size",
        "quantization",
        "random_seed",
        "sampling_backend",
        "served_model_name",
        "speculative_algorithm",
        "speculative_dflash_block_size",
        "speculative_draft_attention_backend",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "tp_size",
        "version",
    }
)

#: Fields of the `ddtree` block that are kept.
DDTREE_FIELDS = frozenset(
    {
        "allow_hybrid_unsafe",
        "arm",
        "block",
        "budget",
        "builder",
        "calibration_sha256",
        "drafter_sha256",
        "dtype",
        "engine",
        "mode",
        "model_sha256",
        "per_request_budget",
        "threads",
        "topk",
    }
)

_SECRETS = (
    re.compile(
        r"(?i)(\b[\w-]*(?:api[_-]?key|token|secret|password)\b[\"']?\s*[=:]\s*[\"']?)"
        r"(?!None\b)[^\s\"',)}]{6,}"
    ),
    re.compile(r"(?i)(\bbearer\s+)\S+"),
    re.compile(r"()\bhf_[A-Za-z0-9]{8,}"),
)
#: CSI up to its final byte, OSC up to BEL or ST, other escapes of ECMA-48; then what was cut off.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b\[[0-?]*$|\x1b(?:[ -/]*[0-~])?"
)


def allowed_server_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `/server_info` answer that may be logged and stored.

    Only scalars of the allowed names are kept: a nested value could carry anything.
    """
    kept = _scalars(info, SERVER_INFO_FIELDS)
    block = info.get("ddtree")
    if isinstance(block, Mapping):
        kept["ddtree"] = _scalars(block, DDTREE_FIELDS)
    return kept


def plain_text(text: str) -> str:
    """The text without the sequences by which programs colour a terminal or move its cursor.

    Those are ECMA-48's control sequences and operating system commands, and escapes of one character.
    """
    return _ESCAPES.sub("", text)


def redact_text(text: str) -> str:
    """A log's text without what looks like a key, a token or a password; plain, since colours hide them."""
    text = plain_text(text)
    for pattern in _SECRETS:
        text = pattern.sub(r"\1[redacted]", text)
    return text


def _scalars(fields: Mapping[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(fields.items())
        if name in allowed and (value is None or isinstance(value, str | int | float | bool))
    }
