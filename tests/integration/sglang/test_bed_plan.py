"""The bed plans' command lines, through SGLang's resolution: on a GPU host a wrong one costs minutes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "gpu"
sys.path.insert(0, str(TOOLS))

import bed_plan  # noqa: E402 - the folder has to be found first
from ddtree_engine.bed.folders import beds_of, write_folders  # noqa: E402
from ddtree_engine.reference import pair_path  # noqa: E402
from engine.headline_arms import NARROWER, SERVED, command, table, with_costs  # noqa: E402
from engine.headline_pair import estimated_costs  # noqa: E402


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


@pytest.mark.parametrize("name", [*SERVED, "narrower"])
def test_the_headlines_servers_resolve_to_what_they_say(name, folder, plugin, monkeypatch, tmp_path):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    served = SERVED[name] if name in SERVED else replace(SERVED["ddtree"], arm=NARROWER["ddtree"])
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(table(estimated_costs(COSTS))))
    config = with_costs(served.arm, costs).config
    if config is not None:
        monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(config))
    record = prepare_server_args(command(folder, served.arm, served.running, 30300)[3:])
    record.resolve_once()
    record.check_server_args()
    view = resolved_view(record)
    running = served.running
    assert (view.max_running_requests, view.max_mamba_cache_size) == (running, running + 2)
    assert view.max_total_tokens >= 640 * running
    assert view.disable_radix_cache
    assert not view.disable_overlap_schedule
    assert view.speculative_algorithm == served.arm.algorithm
    assert (view.quantization == "fp8") == ("fp8" in name)
    if served.arm.algorithm is not None:
        assert view.speculative_num_draft_tokens == (served.arm.width or 16)
