"""The plugin's own facts in /server_info, the log and Prometheus."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from ddtree_engine.sglang_plugin.config import Config


def facts(config: Config, *, width: int, block: int) -> dict[str, Any]:
    """What does not change while the server runs."""
    budget = width - 1 if config.verifies_tree else config.shadow_budget
    return {
        "engine": "sglang",
        "plugin_version": importlib.metadata.version("ddtree"),
        "arm": {"tree": "ddtree", "shadow": "shadow", "unsafe": "unsafe"}[config.mode],
        "mode": str(config.mode),
        "budget": budget,
        "width": width,
        "block": block,
        "topk": config.topk,
        "builder": str(config.builder),
        "state": str(config.state),
        "allow_hybrid_unsafe": config.allow_hybrid_unsafe,
        "per_request_budget": False,
        "step_log": config.step_log is not None,
    }


class Prometheus:
    """`ddtree_*` series; SGLang has set up multi-process mode when --enable-metrics is on."""

    COUNTERS = (
        ("steps", "verified steps"),
        ("requests", "requests in verified steps"),
        ("accepted", "drafts that the target agreed with"),
        ("chain_accepted", "drafts that the top-1 chain alone would have matched"),
        ("below_spine", "request steps that accepted less than their own chain"),
        ("tree_kernel_requests", "request steps that the forked recurrent kernels are seen to have run"),
    )

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter

        self._counters = {
            name: Counter(f"ddtree_{name}", text, list(labels)).labels(**labels)
            for name, text in self.COUNTERS
        }
        self._seen = dict.fromkeys(self._counters, 0)

    def update(self, totals: dict[str, Any]) -> None:
        """Bring the series up to totals since the start."""
        for name, counter in self._counters.items():
            now = int(totals.get(name, 0))
            counter.inc(max(0, now - self._seen[name]))
            self._seen[name] = now
