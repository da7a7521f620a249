"""A sweep that moves the services on between its repeats: containers, each position a fresh start of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.bench.store import Store
from ddtree_ops.cli import app

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]

PROMPTS = [{"id": f"p{index}", "text": f"def f{index}("} for index in range(2)]


def sweep(lab: Lab, results: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    dataset = results.with_name("prompts.jsonl")
    dataset.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    lab.capsys.readouterr()
    argv = ["--json", "bench", "sweep", "--cluster", str(lab.file), "--dataset", str(dataset), "--rotate"]
    code = app.run([*argv, "--repeats", "2", "--results", str(results), "--max-tokens", "8", *options])
    return code, [json.loads(line) for line in lab.capsys.readouterr().out.splitlines()]


def test_every_service_is_started_anew_for_each_repeat_and_all_starts_are_one_cell(
    lab: Lab, tmp_path: Path
) -> None:
    lab.up()
    first = lab.ids()
    results = tmp_path / "results"
    code, events = sweep(lab, results, "--dry-run")
    assert code == 0, events[-1]
    assert events[-1]["rotation"]["places"] == {"plain": ["here", "here"], "tree": ["here", "here"]}
    assert (events[-1]["rotation"]["moves"], lab.ids()) == (1, first)
    code, events = sweep(lab, results)
    assert code == 0, events[-1]
    second = lab.ids()
    assert all(second[name] != first[name] for name in ("lab-plain-0", "lab-tree-0"))
    assert [event["position"] for event in events if event["event"] == "position"] == [0, 1]
    store = Store.open(results)
    assert len(events[-1]["cells"]) == 2
    for cell in events[-1]["cells"]:
        record = store.cell(cell["key"])
        assert record is not None
        assert record.spec.rotation is not None
        assert (record.spec.positions, record.spec.rotation.places) == (2, ["here"])
        assert not [word for word in record.spec.argv if word.startswith(("host=", "gpus="))]
        rows = store.rows(record.key)
        assert sorted((row.prompt_id, row.position) for row in rows) == [
            ("p0", 0),
            ("p0", 1),
            ("p1", 0),
            ("p1", 1),
        ]
    code, events = sweep(lab, results)
    assert (code, len(events[-1]["reused"]), lab.ids()) == (0, 2, second)


def test_a_service_that_does_not_come_back_from_a_move_fails_its_own_cells(lab: Lab, tmp_path: Path) -> None:
    """Its next start ends with code 3; once that is mended, --retry-failed completes the sweep."""
    lab.up()
    results = tmp_path / "results"
    lab.service("tree")["env"] = {"DOUBLE": "exit"}
    lab.file.write_text(yaml.safe_dump(lab.data))
    code, events = sweep(lab, results)
    assert code == 1
    states = {cell["name"]: (cell["state"], str(cell["reason"])) for cell in events[-2]["cells"]}
    assert states["ar"] == ("complete", "None")
    assert states["ddtree 31"][0] == "failed"
    assert "the service did not get to position 2" in states["ddtree 31"][1]
    assert "exited with code 3" in states["ddtree 31"][1]
    lab.service("tree")["env"] = {}
    lab.up()
    code, events = sweep(lab, results, "--retry-failed")
    assert code == 0, events[-1]
    assert {cell["name"]: cell["state"] for cell in events[-1]["cells"]} == {
        "ar": "complete",
        "ddtree 31": "complete",
    }
    assert len(events[-1]["reused"]) == 1


def test_one_service_against_itself_gives_the_floor_of_its_cluster(lab: Lab, tmp_path: Path) -> None:
    """A service of two replicas: both are started anew, and both are measured at each position."""
    lab.service("tree")["replicas"] = 2
    lab.up()
    first = lab.ids()
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"id": f"p{n}", "text": f"def f{n}("}) + "\n" for n in range(6)))
    lab.capsys.readouterr()
    argv = ["--json", "bench", "aa", "--cluster", str(lab.file), "--service", "tree", "--max-tokens", "8"]
    argv += ["--dataset", str(dataset), "--results", str(tmp_path / "results")]
    assert app.run(argv) == 0
    events = [json.loads(line) for line in lab.capsys.readouterr().out.splitlines()]
    (cell,) = events[-1]["cells"]
    assert (cell["name"], cell["state"]) == ("ddtree 31", "complete")
    floors = {event["metric"]: event for event in events if event["event"] == "floor"}
    assert floors["tokens_per_second"]["low"] < 1 < floors["tokens_per_second"]["high"]
    assert floors["accept_length"]["high"] == pytest.approx(1)
    assert [one["requests"] for one in cell["replicas"]] == [2 * 6, 2 * 6]
    names = ("lab-plain-0", "lab-tree-0", "lab-tree-1")
    assert all(lab.ids()[name] != first[name] for name in names)
