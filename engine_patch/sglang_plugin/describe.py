"""The plugin's own facts in /server_info, the log and Prometheus."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from ddtree_engine.sglang_plugin.config import Config


def facts(config: Config, *, width: int, block: int) -> dict[str, Any]:
    """What does not change while the server runs."""
    budget = width - 1 if config.verifies_tree else config.shadow_budget
    several = {}
    if config.widths:
        several = {
            "widths": list(config.widths),
            "budgets": list(config.budgets),
            "default_budget": budget if config.budget is None else config.budget,
        }
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
    } | several


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


class WidthSeries:
    """What the steps of every width did, and the width of the last one; with several widths only."""

    COUNTERS = (
        ("width_steps", "steps", "steps started at this verify width"),
        ("width_requests", "requests", "requests in finished steps of this verify width"),
    )

    def __init__(self, widths: Iterable[int], registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY
        self._counters = {
            key: Counter(f"ddtree_{name}", text, ["width"], registry=registry)
            for name, key, text in self.COUNTERS
        }
        self._last = Gauge(
            "ddtree_last_width",
            "verify width of the last step",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._seen = {(key, str(width)): 0 for key in self._counters for width in widths}

    def update(self, read: dict[str, Any]) -> None:
        """Bring the series up to what `WidthChooser.read` gave."""
        for (key, width), seen in self._seen.items():
            now = int(read["by_width"][width][key])
            self._counters[key].labels(width=width).inc(now - seen)
            self._seen[key, width] = now
        self._last.set(read["last_width"])
