"""The bed plans' command lines, through SGLang's resolution: on a GPU host a wrong one costs minutes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "gpu"
sys.path.insert(0, str(TOOLS))

import bed_plan  # noqa: E402 - the folder has to be found first
import headline_plan  # noqa: E402
from ddtree_engine.bed.folders import beds_of, write_folders  # noqa: E402
from ddtree_engine.reference import pair_path  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bed")
    write_folders(out, pair_path(), beds_of(pair_path()))
    return out


@pytest.mark.parametrize("name", list(bed_plan.ALGORITHMS))
@pytest.mark.parametrize("kind", bed_plan.KINDS)
def test_the_three_servers_differ_in_nothing_but_their_weights(kind, name, folder, plugin):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    argv = bed_plan.argv_of(folder, pair_path(), kind, name, 30000)
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    record = prepare_server_args(argv[3:])
    record.resolve_once()
    record.check_server_args()
    view = resolved_view(record)
    assert view.model_path == str((pair_path() if kind == "small" else folder) / "target")
    assert view.load_format == ("dummy" if kind == "dummy" else "auto")
    assert (view.max_running_requests, view.max_total_tokens, view.max_mamba_cache_size) == (1, 8192, 4)
    assert not view.disable_overlap_schedule
    assert not view.disable_cuda_graph
    if name == "dflash":
        assert view.speculative_algorithm == "DFLASH"
        assert view.speculative_num_draft_tokens == 16


COSTS = Path(__file__).parents[3] / "results" / "h200-27b" / "costs.json"


@pytest.mark.parametrize("running", [4, 16])
@pytest.mark.parametrize("name", ["ar", "dflash", "chain", "ddtree", "ddtree-auto"])
def test_the_headlines_arms_resolve_to_what_they_say(name, running, folder, plugin, monkeypatch):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    trees = name.startswith("ddtree")
    costs = COSTS if name == "ddtree-auto" else None
    arm = headline_plan.tree_arm(costs) if trees else headline_plan.LINEAR[name]
    if arm.config is not None:
        monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(arm.config))
    argv = headline_plan.launch_argv(folder, arm, 30300, headline_plan.server_options(running))
    record = prepare_server_args(argv[3:])
    record.resolve_once()
    record.check_server_args()
    view = resolved_view(record)
    assert (view.max_running_requests, view.max_mamba_cache_size) == (running, 2 * running)
    assert not view.disable_overlap_schedule
    algorithms = {"ar": None, "dflash": "DFLASH"}
    assert view.speculative_algorithm == algorithms.get(name, "DDTREE")
    if name != "ar":
        assert view.speculative_num_draft_tokens == (64 if trees else 16)
