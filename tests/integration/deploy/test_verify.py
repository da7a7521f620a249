"""`ddtree deploy verify` over containers: every replica through its link, no host's name in the bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.verify.conftest import Bundle

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]

PROMPTS = [{"id": f"p{index}", "text": f"def f{index}("} for index in range(2)]


def test_deployed_services_are_judged_and_the_bundle_names_no_host(lab: Lab, tmp_path: Path) -> None:
    lab.data["hosts"]["inline"]["secret-host-name"] = lab.data["hosts"]["inline"].pop("here")
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    out = tmp_path / "bundle.tar.gz"
    options = ("--out", str(out), "--dataset", str(dataset), "--prompts", "2", "--max-tokens", "8")
    code, answer, _ = lab.run("verify", *options)
    assert code == 3, answer
    assert "not everything runs: plain-0 on secret-host-name: there is no container" in answer["message"]
    lab.up()
    before = lab.ids()
    code, answer, lines = lab.run("verify", *options)
    assert code == 1, answer  # the stand-in has no self-check
    found = Bundle(out)
    assert {service.host for service in found.summary.services} == {"host-1"}
    (tree,) = (service.name for service in found.summary.services if service.arm == "ddtree")
    assert found.failed(tree) >= {"node-path", "sibling-swap"}
    assert found.summary.kernels.reason == "the CPU engine's image has no CUDA"
    assert set(found.summary.sweep.cells.values()) == {"complete"}
    assert [host.name for host in found.summary.hosts] in ([], ["host-1"])
    assert not [name for name, data in found.files.items() if b"secret-host-name" in data]
    assert lab.ids() == before
    gates = [line for line in lines if line["event"] == "gate"]
    assert {gate["id"] for gate in gates} == {
        "node-path",
        "sibling-swap",
        "spine",
        "kernel-counter",
        "parity",
    }
