"""A sweep over containers: measured as deployed, one killed in the middle, resumed after `up` revives it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bench.store import Store
from ddtree_ops.cli import app

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]

PROMPTS = [{"id": f"p{index}", "task": "code", "text": f"def f{index}("} for index in range(4)]


def sweep(lab: Lab, results: Path, *options: str) -> tuple[int, dict[str, Any]]:
    dataset = results.with_name("prompts.jsonl")
    dataset.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    lab.capsys.readouterr()
    argv = ["--json", "bench", "sweep", "--cluster", str(lab.file), "--dataset", str(dataset)]
    argv += ["--results", str(results), "--max-tokens", "8", *options]
    code = app.run(argv)
    lines = [json.loads(line) for line in lab.capsys.readouterr().out.splitlines()]
    return code, lines[-1]


def cells(results: Path) -> dict[str, tuple[str, str | None]]:
    records = [json.loads(file.read_text()) for file in results.glob("cells/*/cell.json")]
    return {record["spec"]["arm"]: (record["state"], record["reason"]) for record in records}


def test_the_deployed_services_are_the_sweep(lab: Lab, tmp_path: Path) -> None:
    lab.up()
    before = lab.ids()
    code, plan = sweep(lab, tmp_path / "results", "--dry-run")
    assert code == 0, plan
    assert [cell["name"] for cell in plan["cells"]] == ["ar", "ddtree 31"]
    code, done = sweep(lab, tmp_path / "results")
    assert code == 0, done
    assert cells(tmp_path / "results") == {"ar": ("complete", None), "ddtree": ("complete", None)}
    assert lab.ids() == before
    record = json.loads(next((tmp_path / "results").glob("cells/*/cell.json")).read_text())
    assert record["spec"]["image_digest"] == lab.data["image"]["prebuilt"]
    assert "host=here" in record["spec"]["argv"]


def test_all_replicas_of_a_service_are_measured_and_a_missing_one_is_told(lab: Lab, tmp_path: Path) -> None:
    tree = lab.service("tree")
    tree["replicas"] = 2
    lab.up()
    results = tmp_path / "results"
    code, done = sweep(lab, results)
    assert code == 0, done
    figures = {cell["name"]: cell for cell in done["cells"]}
    endpoints = [one["endpoint"] for one in figures["ddtree 31"]["replicas"]]
    assert endpoints == [f"127.0.0.1:{tree['port'] + number}" for number in range(2)]
    assert [one["requests"] for one in figures["ddtree 31"]["replicas"]] == [len(PROMPTS)] * 2
    assert [one["host"] for one in figures["ar"]["replicas"]] == ["here"]
    lab.engine.stop("lab-tree-1", 0)
    code, error = sweep(lab, tmp_path / "again")
    assert (code, "service tree does not run as a whole: here/lab-tree-1" in error["message"]) == (3, True)
    code, done = sweep(lab, tmp_path / "again", "--replicas", "1")
    assert code == 0, done
    assert {len(cell["replicas"]) for cell in done["cells"]} == {1}


def test_a_container_killed_in_mid_sweep_spoils_its_cell_and_up_and_resume_complete_it(
    lab: Lab, tmp_path: Path
) -> None:
    for service in lab.data["services"]:
        service["env"] = {"DOUBLE_STEP_S": "0.05"}
    lab.up()
    results = tmp_path / "results"

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(results.glob("**/*partial*")):
            time.sleep(0.05)
        lab.engine.stop("lab-tree-0", 0)

    killer = threading.Thread(target=kill_one)
    killer.start()
    code, error = sweep(lab, results)
    killer.join()
    assert code == 1
    found = cells(results)
    assert found["ar"] == ("complete", None)
    assert found["ddtree"][0] == "invalid"
    assert "killed by signal 9" in str(found["ddtree"][1])
    code, error = sweep(lab, results, "--retry-failed")
    assert (code, "service tree does not run" in error["message"]) == (3, True)
    assert lab.up()[0] == 0
    code, _ = sweep(lab, results, "--retry-failed")
    assert (code, cells(results)["ddtree"]) == (0, ("complete", None))
    assert Store.open(results) is not None


def test_a_key_goes_along(lab: Lab, tmp_path: Path) -> None:
    lab.file.with_name("key").write_text("s3cret-key-of-the-test")
    lab.file.with_name("key").chmod(0o600)
    lab.data["secrets"] = {"api_key": {"file": "key"}}
    lab.up()
    code, done = sweep(lab, tmp_path / "results")
    assert code == 0, done
    files = [file for file in (tmp_path / "results").rglob("*") if file.is_file()]
    assert not [file for file in files if b"s3cret" in file.read_bytes()]
