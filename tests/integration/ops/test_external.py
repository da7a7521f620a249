"""Sweeps over servers that somebody else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.schemas.results import CellState
from ddtree_ops.services.local import free_port
from tests.integration.ops.conftest import Serve, Sweeper, answers
from tests.support.ops import write_prompts


def write_sweep(folder: Path, services: list[dict[str, Any]], **changes: Any) -> Path:
    write_prompts(folder / "prompts.jsonl", 3)
    sweep = {
        "engine": {"kind": "external", "services": services},
        "arms": sorted({service["arm"] for service in services}),
        "budgets": [7],
        "dataset": "prompts.jsonl",
        "max_tokens": 16,
        **changes,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


def test_running_servers_are_measured_and_left_running(
    tmp_path: Path, sweeper: Sweeper, serve: Serve
) -> None:
    ar, tree = serve("ar"), serve("ddtree")
    path = write_sweep(tmp_path, [{"arm": "ar", "url": ar}, {"arm": "ddtree", "url": tree}], budgets=[7, 15])
    assert sweeper(path) == 0, sweeper.events[-1]
    assert {cell.state for cell in sweeper.cells().values()} == {CellState.COMPLETE}
    assert len(sweeper.cells()) == 3
    assert answers(ar)
    assert answers(tree)
    assert sweeper(path) == 0
    assert len(sweeper.events[-1]["reused"]) == 3


def test_a_server_with_other_arguments_has_other_keys(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    first = write_sweep(tmp_path, [{"arm": "ddtree", "url": serve("ddtree")}])
    assert sweeper(first) == 0
    second = write_sweep(tmp_path, [{"arm": "ddtree", "url": serve("ddtree", "--topk", "8")}])
    assert sweeper(second) == 0
    assert sweeper.events[-1]["reused"] == []


def test_an_unreachable_server_exits_3(tmp_path: Path, sweeper: Sweeper) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert sweeper(write_sweep(tmp_path, [{"arm": "ar", "url": url}])) == 3
    assert f"{url}/server_info cannot be reached" in sweeper.error()


def test_two_servers_of_one_arm_that_differ_are_no_replicas(
    tmp_path: Path, sweeper: Sweeper, serve: Serve
) -> None:
    urls = [serve("ddtree"), serve("ddtree", "--topk", "8")]
    assert sweeper(write_sweep(tmp_path, [{"arm": "ddtree", "url": url} for url in urls])) == 2
    assert "both serve ddtree-best-first, but are no replicas: topk is 16 and 8" in sweeper.error()


def test_one_server_is_not_two_replicas(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    url = serve("ar")
    assert sweeper(write_sweep(tmp_path, [{"arm": "ar", "url": url}, {"arm": "ar", "url": f"{url}/"}])) == 2
    assert "a server of ar is named twice" in sweeper.error()


def test_a_server_of_another_arm_exits_2(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    assert sweeper(write_sweep(tmp_path, [{"arm": "dflash", "url": serve("ar")}])) == 2
    assert "serves arm 'ar', not 'dflash'" in sweeper.error()


def test_a_server_with_another_budget_is_refused(tmp_path: Path, sweeper: Sweeper, serve: Serve) -> None:
    url = serve("ddtree", "--budget", "15")
    assert sweeper(write_sweep(tmp_path, [{"arm": "ddtree", "budget": 7, "url": url}])) == 1
    assert "ddtree.budget: found 15, asked for 7" in sweeper.error()
