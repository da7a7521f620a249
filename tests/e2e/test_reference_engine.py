"""The operator's commands over the real CPU engine, with a tiny random pair of models."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest
import tenacity
import yaml

from ddtree_ops.bench.store import Store
from ddtree_ops.cli.app import run
from ddtree_ops.schemas.results import CellState
from ddtree_ops.services.local import free_port
from tests.support.ops import start_ddtree, write_prompts

pytest.importorskip("torch", reason="the CPU engine needs torch")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_pair import write_pair

    return write_pair(tmp_path_factory.mktemp("pair"))


def test_every_arm_of_the_real_engine_passes_its_gates(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 3)
    sweep = {
        "engine": {
            "kind": "local",
            "model": str(pair / "target"),
            "drafter": str(pair / "drafter"),
            "allow_hybrid_unsafe": True,
        },
        "arms": ["ar", "dflash", "shadow", "ddtree", {"arm": "ddtree", "builder": "spine-first"}, "unsafe"],
        "budgets": [7],
        "dataset": "prompts.jsonl",
        "max_tokens": 24,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    command = ["bench", "sweep", str(tmp_path / "sweep.yaml"), "--results", str(tmp_path / "r"), "--json"]
    code = run(command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, result
    store = Store.open(tmp_path / "r")
    cells = {cell["name"]: store.cell(cell["key"]) for cell in result["cells"]}
    assert len(cells) == 6
    for name, cell in cells.items():
        assert cell is not None
        assert cell.state is CellState.COMPLETE
        rows = store.rows(cell.key)
        assert all(row.completion_tokens == sum(row.chunk_tokens) == 24 for row in rows)
        if name not in {"ar", "unsafe 7"}:
            assert cell.parity[0].different == 0
        assert all(row.stages is not None and row.stages.verify > 0 for row in rows)


def test_serve_local_becomes_the_engine_and_stops_on_sigterm(pair: Path) -> None:
    port = free_port()
    options = [
        "--model",
        pair / "target",
        "--drafter",
        pair / "drafter",
        "--port",
        str(port),
        "--budget",
        "7",
    ]
    process = start_ddtree("serve", "local", "--arm", "ddtree", *options)
    try:
        info = _server_info(port)
        assert info["ddtree"]["arm"] == "ddtree"
        assert info["ddtree"]["budget"] == 7
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()


@tenacity.retry(stop=tenacity.stop_after_delay(60), wait=tenacity.wait_fixed(0.2))
def _server_info(port: int) -> dict:
    assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    return httpx.get(f"http://127.0.0.1:{port}/server_info").json()


def test_a_calibration_from_real_steps_serves_the_calibrated_builder(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    models = ["--model", str(pair / "target"), "--drafter", str(pair / "drafter")]
    out = tmp_path / "calibration.json"
    given = ["--dataset", str(prompts), "--max-tokens", "32", "--out", str(out), "--quiet"]
    assert run(["bench", "calibrate", *models, *given]) == 0, capsys.readouterr().err
    options = ["--arm", "ar,ddtree", "--budget", "7", "--builder", "calibrated", "--calibration", str(out)]
    load = [
        "--dataset",
        str(prompts),
        "--prompts",
        "1",
        "--max-tokens",
        "16",
        "--results",
        str(tmp_path / "r"),
    ]
    assert run(["bench", "sweep", *models, *options, *load, "--quiet"]) == 0, capsys.readouterr().err
