from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ddtree_kernels import bench

from ddtree_ops.schemas.acceptance import StageStatus
from ddtree_ops.verify.kernels import LocalKernels, idle_card, read_table


def summary(*measured: str) -> str:
    """As the benchmark writes it when these targets were measured."""
    environment = {"hardware": "NVIDIA X", "versions": {"torch": "2.14.1", "sglang": None}}
    results: dict = {name: {"figure": 1.0, "milliseconds": 1.0, "floor_bytes": 1e9} for name in measured}
    results["stock"] = {name: {"milliseconds": 13.5} for name in measured}
    results["bandwidth"] = {"bytes_per_second": 1e12}
    return json.dumps(bench.summary(environment, results, "bench.json"))


def test_the_benchmark_s_own_summary_is_read() -> None:
    table = read_table(summary("verify-n1-q64"), 0, "")
    assert (table.status, table.hardware) == (StageStatus.DONE, "NVIDIA X")
    assert [row.id for row in table.targets] == list(bench.TARGETS)
    first = table.targets[0]
    assert (first.figure, first.target, first.direction, first.error) == (13.5, 12, "min", None)
    assert table.targets[1].figure is None


def test_a_failed_measurement_keeps_the_others() -> None:
    table = read_table(summary(*list(bench.TARGETS)[1:]), 1, "")
    assert table.status is StageStatus.FAILED
    # The exact row is the same measurement held to another error.
    assert table.reason == "exit code 1; without a figure: verify-n1-q64, verify-exact-n1-q64"
    assert table.targets[1].figure == 13.5


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"versions": 1, "targets": []}', "not json"])
def test_no_table_is_a_failure_with_the_end_of_the_output(text: str) -> None:
    table = read_table(text, 1, "one\nCUDA error: no kernel image\n")
    assert (table.status, table.targets) == (StageStatus.FAILED, [])
    assert table.reason == "exit code 1, no table: one / CUDA error: no kernel image"


def test_no_card_is_no_failure() -> None:
    table = read_table("", 3, "no CUDA card here: run this on a GPU host")
    assert (table.status, table.reason) == (StageStatus.SKIPPED, "no CUDA card here: run this on a GPU host")


def test_the_benchmark_runs_on_the_card_that_was_chosen(tmp_path: Path) -> None:
    program = tmp_path / "bench.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "assert sys.argv[1:4] == ['-m', 'ddtree_kernels.bench', '--out'], sys.argv\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-2'\n"
        f"(pathlib.Path(sys.argv[4]) / 'summary.json').write_text({summary()!r})\n"
    )
    table = LocalKernels((sys.executable, str(program))).run_on("GPU-2", tmp_path)
    assert (table.status, table.hardware) == (StageStatus.DONE, "NVIDIA X")
    table = LocalKernels((str(tmp_path / "nothing"),)).run_on("GPU-2", tmp_path)
    assert (table.status, table.reason) == (StageStatus.FAILED, "cannot be run: No such file or directory")


@pytest.mark.parametrize(
    ("answer", "card", "said"),
    [
        ("echo 'GPU-1, 40000'; echo 'GPU-2, 3'", "GPU-2", None),
        ("echo 'GPU-1, 40000'", None, "no idle card: all 1 hold more than 512 MiB"),
        ("echo 'No devices were found'; exit 6", None, "no CUDA card: No devices were found"),
    ],
)
def test_only_an_idle_card_is_taken(
    answer: str, card: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found, reason = idle_card()
    assert found == card
    assert said is None or said in str(reason)
