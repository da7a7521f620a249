"""The dashboard and the alerts ask for metrics that the engines and exporters have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddtree_engine.reference.engine import Arm
from ddtree_engine.reference.metrics import Metrics
from ddtree_engine.sglang_plugin.describe import Prometheus as Plugin

from ddtree_ops.hosts.runner import playbooks_folder

FILES = playbooks_folder() / "roles" / "monitoring" / "files"
#: Read in SGLang 0.5.23 (`observability/metrics_collector.py`).
SGLANG = {
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:mamba_usage",
    "sglang:generation_tokens_total",
    "sglang:spec_verify_calls_total",
    "sglang:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds",
}
#: Default counters of NVIDIA's exporter and of the node exporter.
EXPORTERS = {
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_XID_ERRORS",
    "node_cpu_seconds_total",
    "node_memory_MemAvailable_bytes",
    "node_filesystem_avail_bytes",
}
NAME = re.compile(r"\b(?:sglang:\w+|ddtree_\w+|DCGM_\w+|node_\w+)")


def known() -> set[str]:
    reference = {
        sample.name.removesuffix("_bucket")
        for family in Metrics(Arm.DDTREE, "m").registry.collect()
        for sample in family.samples
    }
    plugin = {f"ddtree_{name}_total" for name, _ in Plugin.COUNTERS}
    return SGLANG | EXPORTERS | plugin | {name for name in reference if name.startswith("ddtree_")}


def expressions() -> Iterator[str]:
    dashboard: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {name.removesuffix("_bucket") for text in expressions() for name in NAME.findall(text)}
    assert asked - known() == set()
    assert {name for name in asked if name.startswith("ddtree_")}


def test_the_reference_engine_has_sglangs_names_too() -> None:
    """What the dashboard shows of speed and acceptance works with both engines."""
    names = {
        sample.name.removesuffix("_bucket")
        for family in Metrics(Arm.DDTREE, "m").registry.collect()
        for sample in family.samples
    }
    assert SGLANG - names == {"sglang:token_usage", "sglang:mamba_usage"}


def test_parentheses_and_brackets_of_expressions_are_balanced() -> None:
    for text in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), text


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yml", "dashboards.yml"])
def test_the_role_installs_the_file(name: str) -> None:
    tasks = (Path(FILES).parent / "tasks" / "server.yml").read_text()
    assert f"src: {name}" in tasks
