from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Builder
from ddtree_ops.schemas.sweep import ExternalEngine
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
