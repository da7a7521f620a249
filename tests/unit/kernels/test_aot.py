"""The offline compile check, for real but on the smallest kernels: in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ddtree_kernels import aot


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ddtree_kernels.aot", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_kernels_compile_offline_for_both_cards(tmp_path):
    table = tmp_path / "table.json"
    done = run("--only", "accept_walk_kernel Q64", "--json", str(table))
    assert done.returncode == 0, done.stderr
    rows = json.loads(table.read_text())["rows"]
    assert [row["arch"] for row in rows] == ["sm_90", "sm_120"]
    assert all(row["registers"] > 0 and row["spill"] == 0 and row["fits"] for row in rows)


@pytest.mark.parametrize(
    ("shared", "spill", "fits"), [(101376, 0, True), (101377, 0, False), (0, aot.SPILL_ALLOWANCE + 1, False)]
)
def test_what_does_not_fit_a_card_is_marked(shared, spill, fits):
    assert aot.Compiled("k", "l", "sm_120", shared, 255, spill, 1.0).fits is fits


def test_every_shipped_width_is_covered():
    labels = {(case.kernel.__name__, case.label) for case in aot.cases()}
    for width in (8, 16, 32, 64, 128):
        for exact in ("", " exact"):
            assert ("_tree_gdn_solve_kernel", f"Q{width} K128 bf16 state fp32{exact}") in labels
