"""`ddtree compare` and the quickstart's dry run, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_ops.cli.app import run
from tests.integration.ops.conftest import Sweeper
from tests.support.ops import STUB, stub_sweep, write_checkpoint, write_prompts


def test_a_store_becomes_a_report_and_a_difference(
    tmp_path: Path, sweeper: Sweeper, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeper(stub_sweep(tmp_path, arms=["ar", "dflash", "ddtree"], prompts=5)) == 0
    assert run(["compare", "report", str(sweeper.results), "--out", str(tmp_path / "page"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(result["html"]).read_text().count("<svg")
    assert all(Path(name).is_file() for name in [*result["png"], *result["csv"]])
    assert run(["compare", "diff", str(sweeper.results), str(sweeper.results)]) == 0
    assert "ddtree 7" in capsys.readouterr().out


def test_comparing_what_is_no_store_exits_2(tmp_path: Path) -> None:
    assert run(["compare", "report", str(tmp_path), "--out", str(tmp_path / "page")]) == 2


def test_the_quickstart_shows_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(write_checkpoint(tmp_path / name)) for name in ("t", "d")]
    given = [
        "--dataset",
        str(write_prompts(tmp_path / "p.jsonl")),
        "--prompts",
        "4",
        "--out",
        str(tmp_path / "q"),
    ]
    assert (
        run(["quickstart", "--dry-run", "--model", models[0], "--drafter", models[1], *given, "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    names = [cell["name"] for cell in plan["cells"]]
    assert names == [
        *("ar", "dflash", "shadow 7", "shadow 63"),
        *("ddtree 7", "ddtree 15", "ddtree 31", "ddtree 63", "ddtree 31 spine-first", "unsafe 31"),
    ]
    assert not (tmp_path / "q").exists()


def test_an_engine_that_cannot_be_run_exits_3(tmp_path: Path, sweeper: Sweeper) -> None:
    assert sweeper(stub_sweep(tmp_path, engine={"command": ["/nowhere/engine", *STUB]})) == 3
    assert "cannot run /nowhere/engine: No such file or directory" in sweeper.error()
