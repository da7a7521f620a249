"""What `ddtree deploy` renders for each arm, through SGLang's own parser and resolution."""

from pathlib import Path

import pytest

from ddtree_ops.deploy.layout import Card, lay_out
from ddtree_ops.deploy.render import CONFIG_VARIABLE, Surroundings, expected_arguments, render
from ddtree_ops.schemas.cluster import Cluster

SERVICES = [
    {"name": "plain", "arm": "ar"},
    {"name": "linear", "arm": "dflash"},
    {"name": "best", "arm": "dflash", "attention_backend": "flashinfer"},
    {"name": "shadow", "arm": "shadow", "budget": 63},
    {"name": "tree", "arm": "ddtree", "budget": 31},
    {"name": "wrong", "arm": "unsafe", "budget": 15, "allow_hybrid_unsafe": True},
    {"name": "wide", "arm": "ddtree", "budget": 31, "tp": 2},
]

#: Because there are no weights, no tokenizer and no card here.
HERE = ["--skip-tokenizer-init", "--load-format", "dummy", "--device", "cuda"]
HERE += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]


def cluster(pair: dict[str, Path]) -> Cluster:
    services = [
        {**service, "port": 30001 + index * 10, "context_length": 2048, "max_running_requests": 2}
        for index, service in enumerate(SERVICES)
    ]
    return Cluster.model_validate(
        {
            "schema": 1,
            "name": "lab",
            "hosts": {"inline": {"a": {}}},
            "model": {"path": str(pair["target"])},
            "drafter": {"path": str(pair["drafter"])},
            "services": services,
        }
    )


@pytest.mark.parametrize("name", [service["name"] for service in SERVICES])
def test_sglang_takes_the_rendered_options_and_says_what_readiness_will_ask(name, plugin, pair, monkeypatch):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    wanted = cluster(pair)
    cards = [Card(f"GPU-{index}", "") for index in range(8)]
    replica = next(one for one in lay_out(wanted, ["a"], {"a": cards}) if one.service.name == name)
    spec = render(wanted, replica, Surroundings("sha256:" + "1" * 64, Path(), cards=cards))
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    if CONFIG_VARIABLE in spec.env:
        monkeypatch.setenv(CONFIG_VARIABLE, spec.env[CONFIG_VARIABLE])
    assert spec.argv[:3] == ("python3", "-m", "ddtree_engine.sglang_plugin.serve")
    record = prepare_server_args([*spec.argv[3:], *HERE])
    record.resolve_once()
    record.check_server_args()
    found = resolved_view(record)
    for key, value in expected_arguments(wanted, replica.service).items():
        assert getattr(found, key) == value, key
    assert (found.host, found.port, found.enable_metrics) == ("127.0.0.1", replica.port, True)
    assert found.speculative_draft_model_path == (None if name == "plain" else str(pair["drafter"]))
    assert found.disable_flashinfer_autotune
    # Of all that SGLang has for several GPUs, what would use multicast.
    assert found.flashinfer_allreduce_fusion_backend is None
    assert not any((found.enable_nccl_nvls, found.enable_symm_mem, found.enable_torch_symm_mem))
    assert found.enforce_disable_flashinfer_allreduce_fusion == (name == "wide")
