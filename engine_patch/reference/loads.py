"""`GET /v1/loads` as SGLang 0.5.23 answers it: a gateway polls it to tell busy replicas from idle ones."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ddtree_engine.reference.errors import RequestError
from ddtree_engine.reference.scheduler import Load

#: The sections that SGLang knows. This engine has figures for `core` alone.
SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


def loads(load: Load, info: Mapping[str, Any], include: str | None, rank: str | None) -> dict[str, Any]:
    """The whole answer; one rank, number 0. Raises RequestError for an unknown section or a bad rank."""
    unknown = {part.strip() for part in include.split(",")} - SECTIONS if include else set()
    if unknown:
        allowed = ", ".join(sorted(SECTIONS))
        raise RequestError(f"include: found {', '.join(sorted(unknown))}, allowed is {allowed}", "include")
    if rank is not None and not rank.isdecimal():
        raise RequestError(f"dp_rank: found {rank!r}, allowed is a whole number", "dp_rank")
    now = datetime.now(UTC)
    return {
        "timestamp": now.isoformat(),
        "version": info["version"],
        "accelerator": None,
        "num_accelerators": 0,
        "loads": [_rank(load, info, now.timestamp())] if rank is None or int(rank) == 0 else [],
    }


def _rank(load: Load, info: Mapping[str, Any], now: float) -> dict[str, Any]:
    running, most = int(info["max_running_requests"]), int(info["context_length"])
    room = running * most
    return {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.waiting_tokens,
        "num_active_tokens": load.used_tokens + load.waiting_tokens,
        "max_total_num_tokens": room,
        "max_running_requests": running,
        "token_usage": load.used_tokens / room,
        "cache_hit_rate": 0.0,
        "utilization": load.running / running,
    }
