from __future__ import annotations

from typing import Any

import pytest
from pydantic import HttpUrl

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.sweep import ExternalEngine, ExternalService
from ddtree_ops.services import discover
from ddtree_ops.services.base import ServiceSpec

SGLANG = {
    "version": "0.5.23",
    "model_path": "Qwen/Qwen3.6-27B",
    "speculative_draft_model_path": "z-lab/Qwen3.6-27B-DFlash",
    "speculative_algorithm": "DFLASH",
    "dtype": "bfloat16",
    "tp_size": 1,
    "api_key": "sk-secret",
}
TREE = {
    "arm": "ddtree",
    "budget": 31,
    "builder": "best-first",
    "topk": 16,
    "dtype": "bfloat16",
    "engine": "sglang",
}


def described(monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], **service: Any) -> ServiceSpec:
    monkeypatch.setattr(discover, "fetch_server_info", lambda url: info)
    entry = {"url": "http://h:1", **service}
    engine = ExternalEngine.model_validate({"kind": "external", "services": [entry]})
    return discover.external_services(engine)[0]


def test_a_plain_sglang_server_is_known_by_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = described(monkeypatch, SGLANG, arm="dflash")
    assert (spec.identity.engine, spec.identity.engine_version) == ("sglang", "0.5.23")
    assert spec.identity.model_sha256 == "path:Qwen/Qwen3.6-27B"
    assert spec.identity.drafter_sha256 == "path:z-lab/Qwen3.6-27B-DFlash"
    assert "tp_size=1" in spec.identity.argv
    assert "sk-secret" not in str(spec)
    plain = {**SGLANG, "speculative_algorithm": None}
    assert described(monkeypatch, plain, arm="ar").identity.drafter_sha256 is None
    with pytest.raises(BadInput, match="speculative_algorithm 'DFLASH' is not 'ar'"):
        described(monkeypatch, SGLANG, arm="ar")
    with pytest.raises(BadInput, match="is not 'ddtree'"):
        described(monkeypatch, SGLANG, arm="ddtree", budget=31)


def test_a_tree_server_with_a_fixed_budget_needs_it_named(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {**SGLANG, "ddtree": TREE}
    spec = described(monkeypatch, info, arm="ddtree", budget=31)
    assert spec.name == "ddtree-best-first-31"
    assert spec.expected == {"arm": "ddtree", "budget": 31}
    assert spec.identity.builder is Builder.BEST_FIRST
    with pytest.raises(BadInput, match="takes its budget at start only") as caught:
        described(monkeypatch, info, arm="ddtree")
    assert "budget: 31" in (caught.value.remedy or "")


def test_the_budget_is_the_cell_s_and_not_the_service_s(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"ddtree": {**TREE, "per_request_budget": True}}
    one = described(monkeypatch, {**SGLANG, **free}, arm="ddtree")
    other = described(monkeypatch, {**SGLANG, "ddtree": {**free["ddtree"], "budget": 63}}, arm="ddtree")
    assert one.identity == other.identity


def replicas(*more: dict[str, Any]) -> list[ServiceSpec]:
    entry = ExternalService(arm=Arm.DFLASH, url=HttpUrl("http://h:1"))
    return [discover.describe_service(entry, {**SGLANG, **info}) for info in more]


def test_replicas_may_differ_in_how_much_memory_was_free_and_in_nothing_else() -> None:
    discover.require_alike(replicas({"max_total_num_tokens": 1000}, {"max_total_num_tokens": 990}))
    with pytest.raises(BadInput, match=r"no replicas: argv is \['tp_size=1'\] and \['tp_size=2'\]"):
        discover.require_alike(replicas({}, {"tp_size": 2}))
    with pytest.raises(BadInput, match=r"no replicas: engine_version is 0\.5\.23 and 0\.5\.24"):
        discover.require_alike(replicas({}, {"version": "0.5.24"}))
