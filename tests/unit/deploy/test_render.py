"""The containers of every arm and engine, as text; and what never gets into one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ddtree_engine.sglang_plugin.config import load_config

from ddtree_ops.containers.spec import Mount
from ddtree_ops.deploy.layout import lay_out
from ddtree_ops.deploy.render import (
    Surroundings,
    expected_arguments,
    expected_block,
    graph_batches,
    nccl_environment,
    render,
    shipped_files,
)
from ddtree_ops.errors import BadInput

from .clusters import cards, cluster, rehearsal

IMAGE = "sha256:" + "1" * 64
HERE = Surroundings(IMAGE, Path(), cards=cards())
MODEL = f"--model-path Qwen/Qwen3.6-27B --revision {'a' * 40}"
COMMON = (
    "--tp-size 1 --context-length 32768 --max-running-requests 4 --mem-fraction-static 0.85 "
    "--mamba-ssm-dtype float32 --max-mamba-cache-size 20 --attention-backend triton "
    "--linear-attn-backend triton --chunked-prefill-size 2048 --random-seed 0 "
    "--cuda-graph-bs-decode 1 2 3 4 --disable-flashinfer-autotune --enable-metrics"
)
DRAFT = (
    "--speculative-draft-attention-backend triton{width} "
    f"--speculative-draft-model-path z-lab/Qwen3.6-27B-DFlash --speculative-draft-model-revision {'b' * 40}"
)
SGLANG = {
    "plain": "",
    "linear": "--speculative-algorithm DFLASH " + DRAFT.format(width=""),
    "shadow": "--speculative-algorithm DDTREE " + DRAFT.format(width=""),
    "tree": "--speculative-algorithm DDTREE " + DRAFT.format(width=" --speculative-num-draft-tokens 32"),
    "wrong": "--speculative-algorithm DDTREE " + DRAFT.format(width=" --speculative-num-draft-tokens 16"),
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": None,
    "shadow": {"mode": "shadow", "budget": 31, "topk": 16, "builder": "best-first", "state": "snapshot"},
    "tree": {"mode": "tree", "budget": 31, "topk": 16, "builder": "best-first", "state": "snapshot"},
    "wrong": {
        "mode": "unsafe", "budget": 15, "topk": 16, "builder": "best-first", "state": "snapshot",
        "allow_hybrid_unsafe": True,
    },
}  # fmt: skip
REFERENCE = {
    "plain": "--arm ar --max-running 4",
    "linear": "--arm dflash --max-running 4",
    "shadow": "--arm shadow --budget 31 --topk 16 --builder best-first --max-running 4",
    "tree": "--arm ddtree --budget 31 --topk 16 --builder best-first --max-running 4",
    "wrong": "--arm unsafe --budget 15 --topk 16 --builder best-first --max-running 4 --allow-hybrid-unsafe",
}


def rendered(wanted: Any, name: str, around: Surroundings = HERE) -> Any:
    replicas = lay_out(wanted, ["a"], {"a": around.cards})
    return render(wanted, next(one for one in replicas if one.service.name == name), around)


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_command_line_for_every_arm(name: str) -> None:
    spec = rendered(cluster(), name)
    port = {"plain": 30001, "linear": 30011, "shadow": 30021, "tree": 30031, "wrong": 30041}[name]
    start = f"python3 -m ddtree_engine.sglang_plugin.serve {MODEL} --host 127.0.0.1 --port {port} {COMMON}"
    assert " ".join(spec.argv) == f"{start} {SGLANG[name]}".strip()
    found = spec.env.get("SGLANG_DDTREE_CONFIG")
    assert (None if found is None else json.loads(found)) == CONFIGS[name]


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config])
def test_the_plugin_accepts_its_configuration(name: str) -> None:
    service = next(one for one in cluster().services if one.name == name)
    config = load_config(rendered(cluster(), name).env)
    assert config.budget == service.budget
    assert config.allow_hybrid_unsafe == service.allow_hybrid_unsafe


@pytest.mark.parametrize("name", REFERENCE)
def test_the_cpu_engines_command_line_for_every_arm(name: str) -> None:
    spec = rendered(rehearsal(), name)
    port = {"plain": 30001, "linear": 30011, "shadow": 30021, "tree": 30031, "wrong": 30041}[name]
    start = "python3 -m ddtree_engine.reference"
    assert " ".join(spec.argv) == f"{start} {REFERENCE[name]} --host 127.0.0.1 --port {port}"
    assert (spec.gpus, spec.ulimits, spec.mounts) == ((), {}, ())


def test_models_are_mounted_read_only_and_compiled_kernels_belong_to_the_image() -> None:
    spec = rendered(cluster(), "tree")
    assert spec.mounts == (
        Mount("/var/lib/ddtree/models", "/models", read_only=True),
        Mount("lab-jit-111111111111", "/var/cache/ddtree", read_only=False),
    )
    assert spec.env["HF_HUB_CACHE"] == "/models"
    assert spec.env["HF_HUB_OFFLINE"] == "1"
    assert all(
        spec.env[name].startswith("/var/cache/ddtree/") for name in ("TRITON_CACHE_DIR", "SGLANG_CACHE_DIR")
    )


def test_folders_of_the_host_keep_their_path() -> None:
    wanted = cluster(model={"path": "/srv/target"}, drafter={"path": "/srv/drafter"})
    spec = rendered(wanted, "linear")
    assert " ".join(spec.argv).count("--revision") == 0
    assert spec.mounts[:2] == (Mount("/srv/target", "/srv/target"), Mount("/srv/drafter", "/srv/drafter"))
    spec = rendered(rehearsal(model={"path": "/srv/target"}, drafter={"path": "/srv/drafter"}), "linear")
    assert "--model /srv/target --drafter /srv/drafter" in " ".join(spec.argv)
    assert [mount.source for mount in spec.mounts] == ["/srv/target", "/srv/drafter"]


def test_a_resolved_branch_is_served_by_its_commit() -> None:
    wanted = cluster(model={"repo": "Qwen/Qwen3.6-27B", "revision": "main"})
    around = replace(HERE, revisions={"Qwen/Qwen3.6-27B": "c" * 40})
    assert f"--revision {'c' * 40} " in " ".join(rendered(wanted, "plain", around).argv)
    assert "--revision main " in " ".join(rendered(wanted, "plain").argv)


def test_the_cpu_engine_takes_a_cached_snapshot_but_no_branch() -> None:
    wanted = rehearsal(model={"repo": "o/m", "revision": "d" * 40}, drafter={"path": "/srv/d"})
    spec = rendered(wanted, "linear")
    assert f"--model /models/models--o--m/snapshots/{'d' * 40} " in " ".join(spec.argv)
    wanted = rehearsal(model={"repo": "o/m"}, drafter={"path": "/srv/d"})
    with pytest.raises(BadInput, match=r"model\.revision: found 'main', allowed: a commit"):
        rendered(wanted, "linear")


def test_a_key_is_a_name_in_the_spec_and_never_a_value(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the-key")
    for wanted in (cluster, rehearsal):
        spec = rendered(wanted(secrets={"api_key": {"file": str(file)}}), "tree")
        assert spec.secret_env == ("DDTREE_API_KEY",)
        assert "the-key" not in json.dumps(spec.public(), default=str)
    assert rendered(cluster(), "tree").secret_env == ()


def test_a_changed_calibration_is_another_container(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    service = {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30031, "builder": "calibrated"}
    service["calibration"] = "calibration.json"
    wanted, around = rehearsal([service]), replace(HERE, folder=tmp_path)
    specs = []
    for text in ("{}", '{"a": 1}'):
        file.write_text(text)
        specs.append(rendered(wanted, "tree", around))
        ((name, content),) = shipped_files(wanted, tmp_path).items()
        assert content == text
        assert specs[-1].mounts == (Mount(f"/var/lib/ddtree/files/{name}", f"/var/lib/ddtree/files/{name}"),)
        assert f"--calibration /var/lib/ddtree/files/{name}" in " ".join(specs[-1].argv)
    assert specs[0].config_hash != specs[1].config_hash
    file.write_text("not JSON")
    with pytest.raises(BadInput, match=r"services\.tree\.calibration: found .*calibration\.json"):
        rendered(wanted, "tree", around)


@pytest.mark.parametrize(
    ("scratch", "state"), [("stash", "wy"), ("snapshots", "snapshot"), (None, "snapshot")]
)
def test_scratch_becomes_the_plugins_state(scratch: str | None, state: str) -> None:
    service = {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30031, "scratch": scratch}
    env = rendered(cluster([service]), "tree").env
    assert json.loads(env["SGLANG_DDTREE_CONFIG"])["state"] == state


def test_only_replicas_of_several_gpus_get_settings_for_nccl() -> None:
    pair = {"name": "pair", "arm": "dflash", "port": 30001, "tp": 2}
    assert rendered(cluster([pair]), "pair").env["NCCL_P2P_LEVEL"] == "PHB"
    wide = {**pair, "tp": 8}
    spec = rendered(cluster([wide]), "pair")
    assert (spec.env["NCCL_P2P_LEVEL"], spec.env["NCCL_IB_DISABLE"]) == ("SYS", "1")
    assert "--tp-size 8" in " ".join(spec.argv)
    single = lay_out(cluster(), ["a"], {"a": cards()})[0]
    assert nccl_environment(single, cards()) == {}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_multicast_between_gpus_is_off_wherever_there_are_several(tp: int) -> None:
    service = {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30031, "tp": tp}
    spec = rendered(cluster([service]), "tree")
    off = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    assert {name: spec.env[name] for name in off if name in spec.env} == (off if tp > 1 else {})
    assert ("--enforce-disable-flashinfer-allreduce-fusion" in spec.argv) == (tp > 1)
    assert len(spec.gpus) == tp
    wanted = {**service, "env": {"NCCL_NVLS_ENABLE": "1"}}
    assert rendered(cluster([wanted]), "tree").env["NCCL_NVLS_ENABLE"] == "1"


def test_what_the_file_says_comes_last() -> None:
    service = {"name": "x", "arm": "ar", "port": 30001, "extra_args": ["--reasoning-parser", "qwen3"]}
    service |= {"env": {"NCCL_P2P_LEVEL": "PXB", "HF_HUB_OFFLINE": "0"}, "shm_gib": 8, "stop_timeout_s": 7}
    spec = rendered(cluster([service]), "x")
    assert spec.argv[-2:] == ("--reasoning-parser", "qwen3")
    assert (spec.env["NCCL_P2P_LEVEL"], spec.env["HF_HUB_OFFLINE"]) == ("PXB", "0")
    assert (spec.shm_gib, spec.stop_timeout_s, spec.ulimits) == (8, 7, {"memlock": -1, "stack": 67108864})


@pytest.mark.parametrize(("bind", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("192.0.2.1",) * 2])
def test_the_health_check_asks_where_the_server_listens(bind: str, asked: str) -> None:
    service = {"name": "x", "arm": "ar", "port": 30001, "bind": bind}
    spec = rendered(rehearsal([service], secrets={"api_key": {"env": "KEY"}}), "x")
    assert spec.healthcheck is not None
    assert f"http://{asked}:30001/ready" in spec.healthcheck.argv[-1]


def test_the_server_must_say_what_was_asked() -> None:
    by_name = {service.name: service for service in cluster().services}
    assert expected_block(cluster(), by_name["linear"]) == {}
    assert expected_arguments(cluster(), by_name["linear"])["speculative_algorithm"] == "DFLASH"
    assert expected_arguments(cluster(), by_name["plain"])["speculative_algorithm"] is None
    assert expected_arguments(cluster(), by_name["tree"])["speculative_num_draft_tokens"] == 32
    assert expected_block(cluster(), by_name["tree"])["budget"] == 31
    assert expected_block(rehearsal(), by_name["linear"]) == {"arm": "dflash", "engine": "reference"}
    assert expected_block(rehearsal(), by_name["wrong"])["allow_hybrid_unsafe"] is True


def test_every_batch_up_to_eight_has_a_graph_and_the_largest_has() -> None:
    assert graph_batches(1) == [1]
    assert graph_batches(4) == [1, 2, 3, 4]
    assert graph_batches(20) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
