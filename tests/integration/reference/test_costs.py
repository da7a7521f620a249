"""`ddtree bench costs` on a real engine."""

from __future__ import annotations

from pathlib import Path

from ddtree_engine.tree.policy import load_costs

from ddtree_ops.cli.app import run
from tests.integration.reference.conftest import process


def test_the_table_of_a_real_server_is_what_the_policy_reads(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    options = ["--budget", "3,7", "--concurrency", "1,2", "--rounds", "1", "--max-tokens", "24"]
    with process(tiny, "--arm", "ddtree", "--budget", "7") as (client, _):
        url = str(client.base_url).rstrip("/")
        assert run(["bench", "costs", url, "--out", str(out), *options]) == 0
    table = load_costs(out)
    assert sorted(table.table) == [4, 8]
    assert all(list(sizes) == [1, 2] for sizes, _ in table.table.values())
