from __future__ import annotations

import json
import subprocess
import sys
from operator import itemgetter

import numpy as np
import pytest
import torch
from ddtree_kernels import bench, bench_inputs
from ddtree_kernels.bench_copy import copy
from ddtree_kernels.bench_inputs import captured_inputs, random_parents
from ddtree_kernels.bench_targets import TARGETS, measurement_of, summary
from ddtree_kernels.bench_timing import Place, timed
from ddtree_kernels.bench_verify import verify_error


def test_a_rehearsal_takes_every_measurement_within_its_error(tmp_path):
    assert bench.main(["--tiny", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    found = json.loads((tmp_path / "summary.json").read_text())
    assert report["failures"] == {}
    assert [row["id"] for row in found["targets"]] == list(TARGETS)
    for row in found["targets"]:
        assert row["raw"] == "bench.json"
        if row["error_target"] is not None:
            assert row["error"] < row["error_target"], row
    errors = report["results"]["numerics"]["errors"]
    assert all(error == 0 for name, error in errors.items() if name.endswith("-repeat") or name == "build")
    assert errors["commit"] < 1e-2
    table = json.loads((tmp_path / "dispatch.json").read_text())
    assert {row["form"] for row in table["rows"]} <= {"wy", "scan"}


def test_ratios_and_floors_come_from_the_same_run():
    results = {
        "bandwidth": {"bytes_per_second": 4e12},
        "stock": {"verify-n1-q64": {"milliseconds": 7.2}},
        "verify-n1-q64": {"milliseconds": 0.6, "floor_bytes": 4e9, "error": 1e-5},
        "verify-adversarial": {"figure": 2e-5, "error": 2e-5},
        "commit-n8": {"milliseconds": 3.0, "floor_bytes": 8e9},
        "verify-n4-q64": {"milliseconds": 1.0},
    }
    rows = {row["id"]: row for row in summary({"hardware": "card"}, results, "bench.json")["targets"]}
    assert rows["verify-n1-q64"]["figure"] == pytest.approx(12)
    assert rows["verify-n1-q64"]["floor_milliseconds"] == pytest.approx(1.0)
    assert rows["commit-n8"]["figure"] == pytest.approx(1.5)
    assert rows["verify-n4-q64"]["figure"] is None
    for one, other in (
        ("verify-exact-n1-q64", "verify-n1-q64"),
        ("verify-adversarial-exact", "verify-adversarial"),
    ):
        differing = {name for name in rows[one] if rows[one][name] != rows[other][name]}
        assert {"id", "error_target"} <= differing <= {"id", "target", "error_target"}


def test_a_target_can_be_asked_for_where_it_reads_another_s_measurement(tmp_path):
    assert bench.main(["--tiny", "--only", "verify-adversarial-exact", "--out", str(tmp_path)]) == 0
    assert list(json.loads((tmp_path / "bench.json").read_text())["results"]) == ["verify-adversarial"]


def test_the_bandwidth_is_that_of_the_faster_copy(tmp_path):
    assert bench.main(["--tiny", "--only", "bandwidth", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())["results"]["bandwidth"]
    assert {row["way"] for row in found["rows"]} == set(found["by_way"]) == {"copy_", "kernel"}
    assert found["bytes_per_second"] == max(row["bytes_per_second"] for row in found["rows"])


@pytest.mark.parametrize("size", [1, 8191, 8192, 20000])
def test_the_copy_kernel_copies_all_of_it_and_no_more(size):
    source, target = torch.randn(size + 5), torch.zeros(size + 5)
    copy(source[:size], target[:size])
    assert torch.equal(target, torch.cat([source[:size], torch.zeros(5)]))


def test_a_sweep_of_commits_is_taken_when_asked_for_and_ends_with_its_best(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.MEASUREMENTS, "memory-q64", lambda place: {"figure": 1.0})
    assert bench.main(["--tiny", "--only", "commit-sweep", "memory-q64", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())["results"]
    found = results["commit-sweep"]
    fastest = {
        launch: min((row for row in found["rows"] if row["launch"] == launch), key=itemgetter("milliseconds"))
        for launch in ("convolution", "replay")
    }
    for name, value in found["best"].items():
        launch = "convolution" if name == "conv_warps" else "replay"
        assert value == fastest[launch]["config"][name]
    assert found["rows"][-1]["launch"] == "both"
    assert all(row["error"] < 1e-2 for row in found["rows"])


def test_sweeps_are_left_out_unless_asked_for(tmp_path, monkeypatch):
    taken = []
    for name in bench.MEASUREMENTS:
        monkeypatch.setitem(
            bench.MEASUREMENTS, name, lambda place, name=name: taken.append(name) or {"rows": []}
        )
    assert bench.main(["--tiny", "--out", str(tmp_path)]) == 0
    sweeps = {name for name in bench.MEASUREMENTS if "sweep" in name}
    plain = set(bench.MEASUREMENTS) - sweeps - {"stock"}
    assert "commit-sweep" in sweeps
    assert set(taken) == plain
    taken.clear()
    assert bench.main(["--tiny", "--sweep", "--out", str(tmp_path)]) == 0
    assert set(taken) == plain | sweeps


def test_what_a_measurement_overwrites_is_put_back_before_the_next_call():
    """Without a card: one call unmeasured, one measured."""
    seen, value = [], [0]

    def work():
        seen.append(value[0])
        value[0] += 1

    timed(Place(bench_inputs.TINY, torch.device("cpu"), tiny=True), work, lambda: value.__setitem__(0, 0))
    assert seen == [0, 0]


def test_a_failing_measurement_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    def broken(place):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(bench.MEASUREMENTS, "memory-q64", broken)
    only = ["memory-q64", "bandwidth"]
    assert bench.main(["--tiny", "--out", str(tmp_path), "--only", *only]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["failures"] == {"memory-q64": "RuntimeError: no such kernel"}
    assert list(report["results"]) == ["bandwidth"]


def test_a_measurement_that_dies_in_its_process_leaves_the_others(tmp_path, monkeypatch):
    """As a fault on a card ends it: what the process said last is kept."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []

    def run(command, **_):
        asked.append(command[command.index("--one") + 1])
        if asked[-1] == "memory-q64":
            return subprocess.CompletedProcess(command, 1, "", "an illegal memory access")
        result = {"figure": 1.0, "environment": {"hardware": "card", "versions": {"torch": "2"}}}
        (tmp_path / f"{asked[-1]}.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert bench.main(["--out", str(tmp_path), "--only", "memory-q64", "build-walk"]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert asked == ["build-walk", "memory-q64"]
    assert "an illegal memory access" in report["failures"]["memory-q64"]
    assert report["results"]["build-walk"]["figure"] == 1.0
    assert report["hardware"] == "card"


def test_one_measurement_runs_in_a_process_of_its_own(tmp_path):
    command = [
        sys.executable,
        "-m",
        "ddtree_kernels.bench",
        "--tiny",
        "--one",
        "memory-q64",
        "--out",
        tmp_path,
    ]
    subprocess.run(command, check=True, timeout=120)
    assert json.loads((tmp_path / "memory-q64.json").read_text())["figure"] > 0


def test_measurements_past_the_time_budget_are_left_out(tmp_path):
    assert bench.main(["--tiny", "--budget-s", "0", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["results"] == {}
    assert {measurement_of(name) for name in TARGETS} <= set(report["failures"])


def test_without_a_card_the_environment_is_at_fault(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 3
    assert "no CUDA card" in capsys.readouterr().err


def test_the_dry_run_lists_the_targets(capsys):
    assert bench.main(["--dry-run"]) == 0
    assert "verify-n1-q64              times faster than stock: >= 12" in capsys.readouterr().out


def test_captured_layers_run_as_inputs(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(6, 2 * 16 + 2 * 8)), "a": rng.normal(size=(6, 2)), "b": rng.normal(size=(6, 2)),
        "A_log": rng.normal(size=2), "dt_bias": rng.normal(size=2), "state": rng.normal(size=(2, 8, 16)),
        "parents": np.array([-1, 0, 0, 1, 1, 2]), "heads": np.array([1, 2]),
    }  # fmt: skip
    path = tmp_path / "pair.npz"
    np.savez(path, **{f"layer0/{name}": array for name, array in arrays.items()})
    (label, inputs), (other, forked) = captured_inputs(torch.device("cpu"), path)
    assert (label, other) == ("layer0", "layer0-tree")
    assert torch.equal(forked.x, inputs.x)
    assert torch.equal(inputs.parents, torch.from_numpy(arrays["parents"])[None])
    assert verify_error(inputs) < 1e-4
    assert list(captured_inputs(torch.device("cpu"), tmp_path / "none.npz")) == []


def test_a_rehearsal_is_small():
    place = Place(bench_inputs.TINY, torch.device("cpu"), tiny=True)
    assert (place.widths(64), place.widths(16), place.batches(8)) == (8, 4, 2)


@pytest.mark.parametrize("width", [1, 16, 64])
def test_random_trees_keep_to_their_depth(width):
    parents = random_parents(3, width, 15)
    depth = torch.zeros(3, width, dtype=torch.int64)
    for row in range(1, width):
        assert (parents[:, row] < row).all()
        depth[:, row] = depth.gather(1, parents[:, row : row + 1])[:, 0] + 1
    assert depth.max() == min(width - 1, 15)
