from __future__ import annotations

import json

import pytest
import torch
from ddtree_kernels import bench
from ddtree_kernels.bench_inputs import random_parents


def test_a_rehearsal_takes_every_measurement_within_its_error(tmp_path):
    assert bench.main(["--tiny", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert report["failures"] == {}
    assert [row["id"] for row in summary["targets"]] == list(bench.TARGETS)
    for row in summary["targets"]:
        assert row["raw"] == "bench.json"
        if row["error_target"] is not None:
            assert row["error"] < row["error_target"], row
    errors = report["results"]["numerics"]["errors"]
    assert all(error == 0 for name, error in errors.items() if name.endswith("-repeat") or name == "build")
    assert errors["commit"] < 1e-2


def test_a_failing_measurement_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("no such kernel")

    for name in ("numerics", "verify", "adversarial", "commit", "build_walk", "conv"):
        monkeypatch.setattr(bench.Bench, name, lambda self, *a, **k: {"figure": 1.0})
    monkeypatch.setattr(bench.Bench, "memory", lambda self, width: broken(self))
    assert bench.main(["--tiny", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["failures"] == {"memory-q64": "RuntimeError: no such kernel"}
    rows = {row["id"]: row for row in json.loads((tmp_path / "summary.json").read_text())["targets"]}
    assert rows["memory-q64"]["figure"] is None
    assert rows["commit-n8"]["figure"] == 1.0


def test_measurements_past_the_time_budget_are_left_out(tmp_path):
    assert bench.main(["--tiny", "--budget-s", "0", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["results"] == {}
    assert set(bench.TARGETS) <= set(report["failures"])


def test_without_a_card_the_environment_is_at_fault(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 3
    assert "no CUDA card" in capsys.readouterr().err


def test_the_dry_run_lists_the_targets(capsys):
    assert bench.main(["--dry-run"]) == 0
    assert "verify-n1-q64              times faster than stock: >= 12" in capsys.readouterr().out


@pytest.mark.parametrize("width", [1, 16, 64])
def test_random_trees_keep_to_their_depth(width):
    parents = random_parents(3, width, 15)
    depth = torch.zeros(3, width, dtype=torch.int64)
    for row in range(1, width):
        assert (parents[:, row] < row).all()
        depth[:, row] = depth.gather(1, parents[:, row : row + 1])[:, 0] + 1
    assert depth.max() == min(width - 1, 15)
