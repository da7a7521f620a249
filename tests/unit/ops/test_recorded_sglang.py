"""What reads a server's answers works on those that a real SGLang gave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ddtree_engine.reference.engine import Arm as EngineArm
from ddtree_engine.reference.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families

import ddtree_ops
from ddtree_ops.bench.client import AnswerStream
from ddtree_ops.hosts.runner import playbooks_folder
from ddtree_ops.redact import allowed_server_info
from ddtree_ops.services.counters import totals_of
from ddtree_ops.services.readiness import argument_mismatch, simulated_acceptance

RECORDED = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.23"
ANSWERS = json.loads((RECORDED / "answers.json").read_text())
INFO = json.loads((RECORDED / "server_info.json").read_text())
METRICS = {
    family.name: family for family in text_string_to_metric_families((RECORDED / "metrics.txt").read_text())
}
NAME = re.compile(r"\b(?:sglang:\w+|ddtree_\w+)")
#: Names of the dashboard that the CPU engine alone has.
REFERENCE_ONLY = {
    "ddtree_steps_below_spine", "ddtree_steps_scored", "ddtree_tree_steps", "ddtree_tree_nodes",
    "ddtree_stage_seconds",
}  # fmt: skip


def family(name: str) -> str:
    return re.sub(r"_(?:total|bucket|sum|count)$", "", name)


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_a_stream_is_read_to_its_end_however_it_is_cut(size):
    stream, data = AnswerStream(), ANSWERS["generate_stream"].encode()
    for start in range(0, len(data), size):
        stream.feed(data[start : start + size], start / 1000)
    assert stream.problem() is None
    assert stream.output_ids == ANSWERS["generate"]["output_ids"]
    assert sum(stream.chunk_tokens) == stream.meta_info["completion_tokens"] == 24
    assert stream.meta_info["spec_verify_ct"] == 14


def test_a_stream_without_its_last_event_broke_off():
    stream = AnswerStream()
    stream.feed(ANSWERS["generate_stream"].encode().partition(b"data: [DONE]")[0], 0.0)
    assert "broke off" in str(stream.problem())


def test_the_servers_own_words_are_understood():
    assert totals_of(INFO) == {"requests": 1771, "tree_kernel_requests": 1771, "below_spine": 22}
    asked = {"arm": "ddtree", "budget": 31, "topk": 16, "builder": "best-first"}
    assert argument_mismatch(asked, INFO) is None
    assert "ddtree.budget" in str(argument_mismatch({"budget": 63}, INFO))
    assert simulated_acceptance(INFO) is None
    kept = allowed_server_info(INFO)
    assert kept["version"] == "0.5.23"
    assert kept["ddtree"]["arm"] == "ddtree"
    assert "model_path" not in kept


def test_dashboard_and_alerts_name_metrics_that_a_real_server_has():
    files = playbooks_folder() / "roles" / "monitoring" / "files"
    text = (files / "dashboard.json").read_text() + (files / "alerts.yml").read_text()
    asked = {family(name) for name in NAME.findall(text)}
    assert asked - set(METRICS) == REFERENCE_ONLY


def test_runbooks_name_metrics_that_a_real_server_has():
    pages = sorted((Path(ddtree_ops.__file__).parent / "runbooks" / "pages").glob("*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("metrics:")]
    asked = {family(name) for line in lines for name in NAME.findall(line)}
    assert asked
    assert asked - set(METRICS) == set()


def test_the_cpu_engine_has_sglangs_names_and_types():
    for own in Metrics(EngineArm.DDTREE, "m").registry.collect():
        if own.name.startswith("sglang:"):
            assert METRICS[own.name].type == own.type, own.name
