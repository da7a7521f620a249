"""Services of several replicas: each answers every prompt, all at the same time, and none hides another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.throughput import share_together
from ddtree_ops.schemas.results import CellState, RequestRow
from tests.integration.ops.conftest import Serve, Sweeper
from tests.integration.ops.test_external import write_sweep
from tests.support.ops import stub_sweep

PROMPTS = 3


def replicated(serve: Serve, arm: str, *faults: str) -> list[dict[str, Any]]:
    """Two servers of an arm, the second one with these faults."""
    words = [word for fault in faults for word in ("--fault", f"{arm}:{fault}")]
    return [{"arm": arm, "url": serve(arm)}, {"arm": arm, "url": serve(arm, *words)}]


def asked(rows: list[RequestRow]) -> Counter[tuple[int, str]]:
    return Counter((row.number, row.prompt_id) for row in rows)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_every_replica_answers_every_prompt_and_they_do_so_together(
    tmp_path: Path, sweeper: Sweeper, concurrency: int
) -> None:
    path = stub_sweep(
        tmp_path, "*:delay:10", prompts=PROMPTS, concurrencies=[concurrency], engine={"replicas": 2}
    )
    assert sweeper(path) == 0, sweeper.events[-1]
    result = sweeper.events[-1]
    for figure, (name, cell) in zip(result["cells"], sweeper.cells().items(), strict=True):
        rows = sweeper.store.rows(cell.key)
        once = {(number, f"p{index}"): 1 for number in (0, 1) for index in range(PROMPTS)}
        assert asked(rows) == once, name
        assert cell.spec.replicas == ["localhost", "localhost"]
        addresses = {row.number: row.replica.endpoint for row in rows if row.replica}
        assert len(set(addresses.values())) == 2
        share = share_together(rows)
        assert share is not None
        assert share > 0  # one after the other would give 0
        rates = [one["tokens_per_second"] for one in figure["replicas"]]
        assert figure["service_tokens_per_second"] == pytest.approx(sum(rates))
        assert max(one["in_flight"] for one in figure["replicas"]) <= concurrency + 1e-6
    assert sweeper(path) == 0
    assert len(sweeper.events[-1]["reused"]) == 2


def test_one_replica_is_another_cell_than_two(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, prompts=PROMPTS, arms=["ar"])
    assert sweeper(path, "--replicas", "2") == 0, sweeper.events[-1]
    assert sweeper(path) == 0
    assert sweeper.events[-1]["reused"] == []
    (alone,) = sweeper.cells().values()
    assert (alone.spec.replicas, alone.requests) == (None, PROMPTS)
    assert [row.replica for row in sweeper.store.rows(alone.key)] == [None] * PROMPTS


def test_a_slow_replica_shows(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    assert sweeper(write_sweep(tmp_path, replicated(serve, "ar", "delay:20"))) == 0, sweeper.events[-1]
    (figure,) = sweeper.events[-1]["cells"]
    fast, slow = figure["replicas"]
    assert fast["tokens_per_second"] > 2 * slow["tokens_per_second"]
    assert (fast["host"], fast["number"], slow["number"]) == ("127.0.0.1", 0, 1)


def test_a_replica_with_other_answers_spoils_its_cell(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    services = [{"arm": "ar", "url": serve("ar")}, *replicated(serve, "dflash", "diverge:9")]
    path = write_sweep(tmp_path, services, warmup=0)
    assert sweeper(path) == 1
    cells = sweeper.cells()
    assert cells["ar"].state is CellState.COMPLETE
    assert cells["dflash"].state is CellState.INVALID
    assert "gate parity-ar: 0 identical" in str(cells["dflash"].reason)


def test_a_replica_that_fails_on_and_on_is_given_up_whatever_the_other_one_answers(
    tmp_path: Path, sweeper: Sweeper, serve: Serve
) -> None:
    """Two golden prompts and a warm-up come through."""
    assert sweeper(write_sweep(tmp_path, replicated(serve, "ar", "refuse-after:3"))) == 1
    (cell,) = sweeper.cells().values()
    assert cell.state is CellState.FAILED
    assert "given up after 3 failed requests in a row" in str(cell.reason)


def test_every_replica_must_be_what_was_asked_for(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    urls = [serve("ddtree", "--budget", budget) for budget in ("7", "15")]
    services = [{"arm": "ddtree", "budget": 7, "url": url} for url in urls]
    assert sweeper(write_sweep(tmp_path, services)) == 1
    assert f"at {urls[1]}: /server_info: ddtree.budget: found 15, asked for 7" in sweeper.error()
