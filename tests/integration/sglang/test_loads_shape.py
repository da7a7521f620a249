"""The CPU engine's /v1/loads has no key that SGLang's own lacks, and the ones that gateways read."""

from __future__ import annotations

from ddtree_engine.reference.loads import SECTIONS, loads
from ddtree_engine.reference.scheduler import Load
from sglang.srt.managers.load_snapshot import LoadSnapshot

INFO = {"version": "0", "max_running_requests": 4, "context_length": 100}


def test_every_key_is_sglangs():
    stock = LoadSnapshot().to_dict({"core"})
    (ours,) = loads(Load(1, 2, 30, 40), INFO, None, None)["loads"]
    assert set(ours) <= set(stock)
    assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage", "dp_rank"} <= set(ours)


def test_the_sections_are_sglangs():
    assert SECTIONS == LoadSnapshot.VALID_SECTIONS
