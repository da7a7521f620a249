"""Reading a store: what is foreign, damaged or newer is refused by name; what was never sealed is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.compare.load import load_results
from ddtree_ops.errors import BadInput
from tests.support.make_store import make_store


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", arms=("ar", "dflash"), prompts=2, max_tokens=16)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def first_cell(store: Path) -> Path:
    return sorted(store.glob("cells/*"))[0]


def test_cells_come_in_plan_order_with_their_rows(store: Path) -> None:
    results = load_results(store)
    assert [cell.label for cell in results.cells][:4] == ["ar", "dflash", "shadow 7", "shadow 15"]
    assert all(len(cell.rows) == 20 for cell in results.cells)
    assert results.missing == ()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: no such folder"):
        load_results(tmp_path / "nowhere")


def test_a_folder_without_a_header_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a results store"):
        load_results(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00\x01", '{"kind": '])
def test_a_header_that_is_not_json_is_corrupt(small: Path, text: str) -> None:
    (small / "store.json").write_text(text)
    with pytest.raises(BadInput, match=r"store\.json: is corrupt"):
        load_results(small)


@pytest.mark.parametrize("header", [[], {"kind": "guidellm"}, {"schema_version": 1}])
def test_somebody_elses_store_json_is_foreign(small: Path, header: object) -> None:
    (small / "store.json").write_text(json.dumps(header))
    with pytest.raises(BadInput, match="kind: found"):
        load_results(small)


def test_a_newer_schema_names_the_version_that_wrote_it(small: Path) -> None:
    edit(small / "store.json", schema_version=2, ddtree_version="9.9")
    with pytest.raises(BadInput, match="schema_version: found 2, allowed: 1") as caught:
        load_results(small)
    assert "9.9" in str(caught.value.remedy)


def test_an_unknown_key_in_a_cell_names_file_and_key(small: Path) -> None:
    edit(first_cell(small) / "cell.json", surprise=1)
    with pytest.raises(BadInput, match=r"cell\.json: surprise"):
        load_results(small)


def test_a_cell_whose_spec_was_edited_is_refused(small: Path) -> None:
    file = first_cell(small) / "cell.json"
    data = json.loads(file.read_text())
    data["spec"]["max_tokens"] = 999
    file.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="not the hash of its spec"):
        load_results(small)


def test_rows_that_were_changed_after_sealing_are_refused(small: Path) -> None:
    rows = first_cell(small) / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"prompt_tokens":200', '"prompt_tokens":201'))
    with pytest.raises(BadInput, match=r"rows\.jsonl"):
        load_results(small)


def test_a_lost_rows_file_is_refused(small: Path) -> None:
    (first_cell(small) / "rows.jsonl").unlink()
    with pytest.raises(BadInput, match=r"rows\.jsonl"):
        load_results(small)


def test_planned_cells_that_were_never_sealed_are_missing_not_forgotten(tmp_path: Path) -> None:
    path = make_store(
        tmp_path / "s", arms=("ar", "dflash"), prompts=2, max_tokens=16, unsealed=[("ar", None)]
    )
    results = load_results(path)
    assert [cell.label for cell in results.cells] == ["dflash"]
    assert len(results.missing) == 1


def test_a_run_without_any_sealed_cell_says_how_to_go_on(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("ar",), prompts=2, max_tokens=16, unsealed=[("ar", None)])
    with pytest.raises(BadInput, match="no sealed cell"):
        load_results(path)


def test_the_latest_run_is_read_and_an_older_one_on_request(small: Path) -> None:
    make_store(small, arms=("dflash",), prompts=2, max_tokens=16, run_id="20260101-000000-u")
    assert [cell.label for cell in load_results(small).cells] == ["dflash"]
    assert len(load_results(small, "20260101-000000-test").cells) == 2
    with pytest.raises(BadInput, match="allowed: 20260101-000000-test, 20260101-000000-u"):
        load_results(small, "yesterday")


def test_comparing_needs_neither_ansible_nor_docker_nor_torch() -> None:
    code = (
        "import sys; import ddtree_ops.compare.report, ddtree_ops.compare.diff, ddtree_ops.compare.summary; "
        "heavy = {'torch', 'docker', 'ansible', 'ansible_runner', 'sglang', 'ddtree_engine'}; "
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
