"""The offline compile check, for real but on the smallest kernels: in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("shared", "spill", "fits"), [(101376, 0, True), (101377, 0, False), (0, 4, False)])
def test_what_does_not_fit_a_card_is_marked(shared, spill, fits):
    assert aot.Compiled("k", "l", "sm_120", shared, 255, spill, 1.0).fits is fits


WARP_GROUP_PRODUCT = """
import sys
sys.path.insert(0, sys.argv[1])
from compiled_dots import dot_kernel
from ddtree_kernels import aot
sizes = {"M": 64, "N": 64, "K": 64, "DOUBLED": 0, "X_TURNED": 0, "Y_TURNED": 0}
types = {"x": "*bf16", "y": "*bf16", "out": "*fp32"}
case = aot.Case(dot_kernel, "64", types, sizes, {"num_warps": 4})
print([aot.compile_case(case, arch).fits for arch in aot.ARCHITECTURES])
"""


def test_a_kernel_that_multiplies_by_warp_groups_does_not_fit_hopper():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WARP_GROUP_PRODUCT, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout == "[False, True]\n", done.stderr[-2000:]


def test_every_shipped_width_is_covered():
    labels = {(case.kernel.__name__, case.label) for case in aot.cases()}
    for width in (8, 16, 64):
        assert ("_tree_gdn_writes_kernel", f"Q{width} K128 bf16 state fp32") in labels
    for heads in (192, 384):
        assert ("_tree_gdn_tiles_kernel", f"Q16 K128 bf16 state fp32 {heads} heads") in labels
    for shape in ("Q32 K128 bf16 state fp32", "Q64 K128 bf16 state fp32 96 heads"):
        assert ("_tree_gdn_fused_kernel", shape) in labels
    for width in (64, 128):  # 64: on cards other than Hopper
        assert ("_tree_gdn_respond_kernel", f"Q{width} K128 bf16") in labels
        assert ("_tree_gdn_stream_kernel", f"Q{width} K128 bf16 state fp32") in labels


def test_the_page_shows_every_configuration_and_all_of_them_fit():
    page = (Path(__file__).parents[3] / "docs/kernels.md").read_text(encoding="utf-8")
    table = page.split(aot.BEGIN)[1].split(aot.END)[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")][1:]
    shown = {(row[0], row[1], row[2]) for row in rows}
    assert shown == {
        (case.kernel.__name__.strip("_").removesuffix("_kernel"), case.label, f"sm_{arch}")
        for case in aot.cases()
        for arch in case.architectures
    }
    assert all(int(row[3]) <= aot.SHARED_MEMORY_LIMIT and row[5] == "0" for row in rows)


def test_the_table_replaces_what_stands_between_the_markers():
    row = aot.Compiled("k", "Q8", "sm_90", 1024, 64, 0, 1.0)
    page = f"a\n{aot.BEGIN}\nold\n{aot.END}\nz\n"
    once = aot.with_table(page, [row])
    assert "| k | Q8 | sm_90 | 1024 | 64 | 0 |" in once
    assert "old" not in once
    assert once.startswith("a\n")
    assert once.endswith("z\n")
    assert aot.with_table(once, [row]) == once
