"""The GPU plan's command lines, through SGLang's resolution: on a GPU host a wrong one costs minutes."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from ddtree_engine.bed.folders import beds_of, write_folders
from ddtree_engine.reference import pair_path

TOOLS = Path(__file__).parents[3] / "tools" / "gpu"
sys.path.insert(0, str(TOOLS))

from engine import arms, diagnosis, host, step_parts  # noqa: E402 - the folder has to be found first


@pytest.fixture
def context(pair, tmp_path, request):
    # The kinds of checkpoints are written from a real pair.
    kind = arms.ARMS[request.node.callspec.params.get("name", "ar")].kind
    folder = pair["target"].parent if kind is None else pair_path()
    options = argparse.Namespace(pair=folder, out=tmp_path, minutes=1)
    return host.Context(options, site=tmp_path, raw=tmp_path)


def resolve(argv, plugin):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    assert argv[1:3] == ["-m", "sglang.launch_server"]
    record = prepare_server_args([*argv[3:], "--skip-tokenizer-init", "--load-format", "dummy"])
    record.resolve_once()
    record.check_server_args()
    return resolved_view(record)


KINDS = """
ar dflash shadow chain tree16-eager tree16-cached tree8 tree64 tree32-log tree32-log-float32 tree32-cached
tree32-pages tree32-grammar unsafe32 tree64-check tree32-fused-move tree32-tp2 chain-wy tree64-wy
tree32-cached-wy tree32-pages-wy tree64-widths tree64-widths-wy tree64-auto tree32-text tree32-vision
tree32-vision-wy
ar-vision dflash-window tree32-window tree32-long dflash-long ar-long ar-fp8 tree32-fp8 tree32-fp8-wy
tree32-fp8-drafter ar-kv8 tree32-kv8
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_arm_resolves_to_what_it_says(name, context, plugin, monkeypatch):
    arm = arms.ARMS[name]
    table = {"schema": 1, "kind": "ddtree-step-costs", "seconds": {w: {"1": 1.0} for w in ("16", "32", "64")}}
    (context.raw / "tree64-widths.costs.json").write_text(json.dumps(table))
    environment = context.environment(arm, name)
    if "SGLANG_DDTREE_CONFIG" in environment:
        monkeypatch.setenv("SGLANG_DDTREE_CONFIG", environment["SGLANG_DDTREE_CONFIG"])
    view = resolve(arms.argv_of(context.pair_of(arm), arm, 30000), plugin)
    assert view.max_running_requests == 8
    assert not view.disable_overlap_schedule
    if arm.width is not None:
        assert view.speculative_num_draft_tokens == arm.width
        assert view.speculative_dflash_block_size == arms.BLOCK
    assert view.disable_cuda_graph == ("--disable-cuda-graph" in arm.flags)
    assert view.disable_radix_cache == ("--disable-radix-cache" in arm.flags)
    if not view.disable_radix_cache:
        assert view.mamba_radix_cache_strategy == "extra_buffer"


def test_the_shipped_pair_and_its_prompts_are_what_the_plan_takes(plugin, monkeypatch):
    pair = host.ROOT / "engine_patch" / "reference" / "pair"
    arm = arms.ARMS["tree32"]
    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(arm.config))
    view = resolve(arms.argv_of(pair, arm, 30000), plugin)
    assert view.speculative_dflash_block_size == arms.BLOCK
    prompts = host.make_prompts(pair, 40)
    assert len(prompts) >= 20
    assert sum(map(len, prompts)) > 300
    assert all(60 <= len(ids) <= host.LONGEST for ids in prompts)


def test_the_server_of_a_breakdown_resolves(tmp_path, plugin, monkeypatch):
    arm = step_parts.ARM
    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(arm.config))
    write_folders(tmp_path, pair_path(), beds_of(pair_path()))
    for key, value in arm.environment:
        monkeypatch.setenv(key, value)
    argv = arms.launch_argv(tmp_path, arm, 30000, step_parts.SERVER)
    view = resolve([part for part in argv if part not in ("--skip-tokenizer-init",)], plugin)
    assert view.max_running_requests == step_parts.RUNNING
    assert view.speculative_num_draft_tokens == arm.width


WAYS = ["no-graphs", "no-overlap", "blocking", "torch-builder", "no-self-check"]


@pytest.mark.parametrize("way", WAYS)
def test_the_simpler_ways_of_a_broken_arm_resolve(way, context, plugin, monkeypatch):
    ways = diagnosis.simpler(arms.ARMS["tree16-cached"])
    assert list(ways) == WAYS
    environment = context.environment(ways[way], way)
    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", environment["SGLANG_DDTREE_CONFIG"])
    view = resolve(arms.argv_of(context.options.pair, ways[way], 30000), plugin)
    assert view.disable_cuda_graph == (way in ("no-graphs", "blocking"))
    assert view.disable_overlap_schedule == (way == "no-overlap")
    assert ("CUDA_LAUNCH_BLOCKING" in environment) == (way == "blocking")


def test_answers_about_pictures_and_long_texts_are_judged_by_gaps():
    from engine.checkpoints import against

    best = [[-0.1, 5, None], [-0.35, 6, None], [-3.0, 7, None]]
    said = {"output_ids": [5, 5], "best": [best, best], "spec_verify_ct": 32}
    other, far = said | {"output_ids": [5, 6]}, said | {"output_ids": [9, 5]}
    refused = {"status": 400, "body": ""}
    theirs = {"alone": [said] * 4}
    found = against({"alone": [said, other, far, refused]}, theirs)
    assert (found["compared"], found["identical"]) == (3, 1)
    assert found["gaps"] == [0.25, None]
    assert found["refused"] == ["400, reference 200"]
    assert found["accept_length"] == 2.0


def test_arms_of_other_numbers_are_not_compared():
    from engine.judgement import comparable

    assert comparable("tree32-vision", "ar")
    assert comparable("tree32-fp8", "ar-fp8")
    assert comparable("tree32-window", "dflash")
    for pair in (("tree32-fp8", "ar"), ("tree32-kv8", "ar-fp8"), ("tree32", "ar-kv8"), ("tree32-tp2", "ar")):
        assert not comparable(*pair)


def test_the_plugins_metadata_is_found_as_an_installed_package_is(tmp_path):
    import subprocess

    host.install_plugin(tmp_path)
    code = (
        "import importlib.metadata as m\n"
        "(point,) = m.entry_points(group='sglang.srt.plugins', name='ddtree')\n"
        "print(point.value, m.version('ddtree'))\n"
        "import ddtree_engine.sglang_plugin.config\n"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.split()[-1:] == ["0.1.0"], answer.stderr
    assert "register:register" in answer.stdout
