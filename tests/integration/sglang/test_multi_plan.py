"""The command lines of the plan for several cards, through SGLang's resolution."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine import cards, host

PAIR = host.ROOT / "engine_patch" / "reference" / "pair"


@pytest.mark.parametrize(
    "seat",
    [*cards.single_seats(list(cards.ARMS), 1), *cards.wide_seats("ddtree", 2, 2)],
    ids=lambda s: s.name,
)
def test_a_server_on_its_cards_resolves_to_what_it_says(seat, plugin, monkeypatch):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    arm = seat.served()
    if arm.config is not None:
        monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps(arm.config))
    argv = seat.argv(PAIR, 30700)
    record = prepare_server_args([*argv[3:], "--load-format", "dummy"])
    record.resolve_once()
    record.check_server_args()
    view = resolved_view(record)
    assert (view.tp_size, view.port, view.nccl_port) == (seat.tp, 30700, 30701)
    assert view.max_running_requests == 4 * seat.tp
    assert view.disable_radix_cache
    assert not view.disable_cuda_graph
    assert view.flashinfer_allreduce_fusion_backend is None
    assert not any((view.enable_nccl_nvls, view.enable_symm_mem, view.enable_torch_symm_mem))
    assert view.disable_custom_all_reduce == (seat.tp > 1)
