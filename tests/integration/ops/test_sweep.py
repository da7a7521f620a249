"""Whole sweeps over stub servers: real processes, real HTTP, real files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ddtree_ops.schemas.results import CellState, GateStatus, RequestStatus
from tests.integration.ops.conftest import Sweeper
from tests.support.ops import stub_sweep

ALL_ARMS = ["ar", "dflash", "shadow", "ddtree", {"arm": "ddtree", "builder": "spine-first"}, "unsafe"]


def gate(record, gate_id: str):
    return next(gate for gate in record.gates if gate.id == gate_id)


def test_all_arms_are_measured_judged_and_sealed(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, arms=ALL_ARMS, budgets=[7, 31])
    assert sweeper(path) == 0, sweeper.events[-1]
    cells = sweeper.cells()
    assert len(cells) == 10
    assert {cell.state for cell in cells.values()} == {CellState.COMPLETE}
    for name, cell in cells.items():
        rows = sweeper.store.rows(cell.key)
        assert len(rows) == 4
        assert all(row.status is RequestStatus.OK and sum(row.chunk_tokens) == 24 for row in rows)
        assert all(len(row.chunk_s) == len(row.chunk_tokens) and row.ttft_s == row.chunk_s[0] for row in rows)
        assert all((row.verify_steps is None) == (name == "ar") for row in rows)
        assert cell.server["ddtree"]["arm"] == cell.spec.arm
    assert gate(cells["ddtree 31"], "parity-ar").value == 0
    assert [parity.different for parity in cells["unsafe 31"].parity] == [4, 4]
    assert gate(cells["unsafe 31"], "parity-ar").status is GateStatus.FIGURE
    assert gate(cells["ddtree 31 spine-first"], "steps-below-spine").status is GateStatus.PASS
    assert gate(cells["shadow 7"], "shadow-equals-dflash").status is GateStatus.PASS
    accepted = {
        name: sum(row.correct_drafts or 0 for row in sweeper.store.rows(cell.key))
        for name, cell in cells.items()
    }
    assert accepted["ddtree 31"] > accepted["ddtree 7"] > 0
    assert accepted["shadow 31"] == accepted["dflash"]


def test_prompts_are_interleaved_over_the_arms_in_rotating_order(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, arms=["ar", "dflash", "ddtree"], repeats=2, prompts=3)
    assert sweeper(path) == 0
    rows = [(row, name) for name, cell in sweeper.cells().items() for row in sweeper.store.rows(cell.key)]
    rows.sort(key=lambda pair: pair[0].order)
    rounds = [[name for row, name in rows if row.round == round_] for round_ in range(6)]
    assert rounds[:3] == [
        ["ar", "dflash", "ddtree 7"],
        ["dflash", "ddtree 7", "ar"],
        ["ddtree 7", "ar", "dflash"],
    ]
    assert [row.round for row, _ in rows] == sorted(row.round for row, _ in rows)
    assert {(row.prompt_id, row.repeat) for row, _ in rows} == {
        (f"p{n}", r) for n in range(3) for r in range(2)
    }


def test_sealed_cells_are_skipped_and_new_ones_are_added(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path)
    assert sweeper(path) == 0
    before = {name: (cell, cell.ended) for name, cell in sweeper.cells().items()}
    assert sweeper(path) == 0
    assert sorted(sweeper.events[-1]["reused"]) == sorted(cell.key for cell, _ in before.values())
    assert not [event for event in sweeper.events if event["event"] == "cell"]
    assert sweeper(path, "--budget", "7,15") == 0
    cells = sweeper.cells()
    assert {name: cells[name].ended for name in before} == {
        name: ended for name, (_, ended) in before.items()
    }
    assert [event["name"] for event in sweeper.events if event["event"] == "cell"] == ["ddtree 15"]
    assert cells["ddtree 15"].parity[0].identical == 4
    runs = sorted((sweeper.results / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(runs) == 3
    # The target itself must be there to be asked about differences, though its cell is sealed.
    assert sorted(path.name for path in (runs[-1] / "logs").iterdir()) == ["ar.log", "ddtree.log"]


def test_concurrency_and_temperature_make_blocks_of_their_own(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "*:delay:20", concurrencies=[1, 3], temperatures=[0.0, 0.8], max_tokens=8)
    assert sweeper(path) == 0, sweeper.events[-1]
    records = [sweeper.store.cell(cell["key"]) for cell in sweeper.events[-1]["cells"]]
    assert len(records) == 8
    for record in records:
        assert record is not None
        rows = sweeper.store.rows(record.key)
        spans = sorted((row.sent_at, row.sent_at + (row.e2e_s or 0)) for row in rows)
        overlap = any(later[0] < earlier[1] - 0.01 for earlier, later in pairwise(spans))
        assert overlap == (record.spec.concurrency == 3)
        if record.spec.temperature > 0 and record.spec.arm == "ddtree":
            assert gate(record, "parity-ar").status is GateStatus.SKIP


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("ddtree:diverge:2", CellState.INVALID, "parity probe: p0: output token"),
        ("ddtree:diverge:18", CellState.INVALID, "gate parity-ar: 0 identical, 0 near-ties, 4 different"),
        ("ddtree:near-tie", CellState.INVALID, "gate near-ties"),
        ("ddtree:cached:3", CellState.INVALID, "gate cold-cache: cached prompt tokens"),
        ("ddtree:idle-tree", CellState.INVALID, "gate kernel-path"),
        (
            "ddtree:args-drift:6",
            CellState.INVALID,
            "gate arguments: /server_info: ddtree.topk: found 17, asked for 16",
        ),
        ("ddtree:loop", CellState.INVALID, "parity probe"),
        ("ddtree:no-spec", CellState.FAILED, "no meta_info.spec_verify_ct"),
        ("ddtree:cut:6", CellState.FAILED, "1 of 4 requests failed; p2:"),
        (
            "ddtree:refuse-after:4",
            CellState.FAILED,
            "given up after 3 failed requests in a row, the last: HTTP 503",
        ),
        ("ddtree:hang:5", CellState.FAILED, "timed out after 2 s"),
    ],
)
def test_a_fault_is_found_sealed_with_its_reason_and_fails_the_command(
    tmp_path: Path, sweeper: Sweeper, fault: str, state: CellState, reason: str
) -> None:
    assert sweeper(stub_sweep(tmp_path, fault, request_timeout_s=2)) == 1
    cells = sweeper.cells()
    assert cells["ar"].state is CellState.COMPLETE
    assert cells["ddtree 7"].state is state
    assert reason in (cells["ddtree 7"].reason or "")
    assert "ddtree 7" in sweeper.error()
    assert sweeper.error().startswith("1 of 2 cells are no results")


def test_near_ties_in_bf16_are_measured_on_the_spot_and_allowed(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "ddtree:near-tie", engine={"dtype": "bfloat16"})
    assert sweeper(path) == 0, sweeper.events[-1]
    parity = sweeper.cells()["ddtree 7"].parity[0]
    assert (parity.near_tie, parity.different) == (4, 0)
    assert parity.findings[0].threshold == pytest.approx(0.02)
    assert parity.findings[0].gap == pytest.approx(5e-5, rel=1e-3)


def test_a_clear_gap_in_bf16_is_no_near_tie(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "ddtree:diverge:18", engine={"dtype": "bfloat16"})
    assert sweeper(path) == 1
    finding = sweeper.cells()["ddtree 7"].parity[0].findings[0]
    assert finding.gap == pytest.approx(2.0)
    assert finding.first_difference is not None
    assert finding.first_difference >= 18


def test_spine_first_must_not_fall_below_its_spine(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "ddtree:below-spine:2", budgets=[15], engine={"builder": "spine-first"})
    assert sweeper(path) == 1
    assert "gate steps-below-spine: 8 of" in (sweeper.cells()["ddtree 15 spine-first"].reason or "")


def test_a_server_that_dies_takes_only_its_own_cells_along(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "ddtree:dies-after:8", arms=["ar", "dflash", "ddtree"], budgets=[7, 31])
    assert sweeper(path) == 1
    cells = sweeper.cells()
    assert cells["ar"].state is cells["dflash"].state is CellState.COMPLETE
    assert cells["dflash"].parity[0].identical == 4
    for name in ("ddtree 7", "ddtree 31"):
        assert cells[name].state is CellState.INVALID
        assert cells[name].requests > cells[name].failed_requests
        assert "service ddtree exited with code 7" in (cells[name].reason or "")
    log = sweeper.results / "cells" / cells["ddtree 7"].key[:16] / "logs" / "ddtree.log"
    logs = log.read_text() if log.exists() else (cells["ddtree 7"].reason or "")
    assert "illegal memory access" in logs


def test_a_server_that_dies_before_it_answered_leaves_no_numbers_and_failed_cells(
    tmp_path: Path, sweeper: Sweeper
) -> None:
    """Two golden prompts are answered, the warm-up is not."""
    path = stub_sweep(tmp_path, "ddtree:dies-after:2")
    assert sweeper(path) == 1
    cell = sweeper.cells()["ddtree 7"]
    assert (cell.state, cell.requests) == (CellState.FAILED, 0)
    assert "service ddtree exited with code 7" in (cell.reason or "")


def test_a_reference_that_dies_leaves_the_others_unjudged_not_failed(
    tmp_path: Path, sweeper: Sweeper
) -> None:
    path = stub_sweep(tmp_path, "ar:dies-after:5", arms=["ar", "dflash", "ddtree"])
    assert sweeper(path) == 1
    cells = sweeper.cells()
    assert cells["ar"].state is CellState.INVALID
    assert cells["ddtree 7"].state is CellState.COMPLETE
    assert gate(cells["ddtree 7"], "parity-ar").status is GateStatus.SKIP
    assert gate(cells["ddtree 7"], "parity-dflash").status is GateStatus.PASS


def test_failed_cells_are_measured_again_on_request_only(tmp_path: Path, sweeper: Sweeper) -> None:
    marker = tmp_path / "mended"
    faulty = stub_sweep(tmp_path, f"ddtree:refuse-after:4:{marker}")
    assert sweeper(faulty) == 1
    first = sweeper.cells()["ddtree 7"]
    assert sweeper(faulty) == 1
    assert sweeper.cells()["ddtree 7"] == first
    marker.touch()
    assert sweeper(faulty, "--retry-failed") == 0, sweeper.events[-1]
    assert sweeper.cells()["ddtree 7"].state is CellState.COMPLETE
    assert (sweeper.results / "aside" / f"{first.key[:16]}.1" / "cell.json").is_file()


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("ddtree:never-ready", "was not ready after 2 s: /ready answers 503"),
        ("ddtree:exit-at-start:9", "exited with code 9"),
        ("ddtree:wrong-topk", "ddtree.topk: found 17, asked for 16"),
        ("ddtree:nondeterministic", "greedy answers differ"),
        ("ddtree:empty", "an empty answer"),
        ("ddtree:simulate", "simulated acceptance is not a result"),
        ("ddtree:dies-after:0", "exited with code 7"),
    ],
)
def test_nothing_is_measured_when_a_service_is_not_ready(
    tmp_path: Path, sweeper: Sweeper, fault: str, complaint: str
) -> None:
    patience = 2 if "never-ready" in fault else 60
    assert sweeper(stub_sweep(tmp_path, fault, start_timeout_s=patience)) == 1
    assert complaint in sweeper.error()
    assert not (sweeper.results / "cells").exists()


def test_a_process_that_exits_ends_the_wait_at_once_with_its_last_words(
    tmp_path: Path, sweeper: Sweeper
) -> None:
    import time

    begun = time.monotonic()
    assert sweeper(stub_sweep(tmp_path, "ar:exit-at-start:3", start_timeout_s=600)) == 1
    assert time.monotonic() - begun < 200
    assert "cannot load the model (scripted)" in sweeper.error()


def test_a_slow_start_is_waited_for(tmp_path: Path, sweeper: Sweeper) -> None:
    assert sweeper(stub_sweep(tmp_path, "ddtree:slow-start:2", prompts=1)) == 0


def test_no_secret_of_a_server_reaches_the_store(tmp_path: Path, sweeper: Sweeper) -> None:
    sweeper(stub_sweep(tmp_path, "ddtree:secret", "ddtree:dies-after:6"))
    kept = [path for path in sweeper.results.rglob("*") if path.is_file() and "runs" not in path.parts]
    assert any(path.name == "reason.txt" for path in kept)
    for path in kept:
        assert "sk-very-secret" not in path.read_text(), path
    assert "sk-very-secret" not in json.dumps(sweeper.events)
    log = next(sweeper.results.glob("runs/*/logs/ddtree.log"))
    assert log.stat().st_mode & 0o077 == 0


def test_a_proxy_of_the_environment_is_not_asked_for_services(
    tmp_path: Path, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert sweeper(stub_sweep(tmp_path, arms=["ar"], prompts=1, start_timeout_s=60)) == 0, sweeper.events[-1]


def test_the_incremental_stream_gives_the_same_rows(tmp_path: Path, sweeper: Sweeper) -> None:
    assert sweeper(stub_sweep(tmp_path, "*:incremental")) == 0, sweeper.events[-1]
    assert sweeper.cells()["ddtree 7"].parity[0].identical == 4


def test_a_dry_run_starts_nothing_and_writes_nothing(tmp_path: Path, sweeper: Sweeper) -> None:
    path = stub_sweep(tmp_path, "*:exit-at-start:1", budgets=[7, 31])
    assert sweeper(path, "--dry-run") == 0
    plan = sweeper.events[-1]
    assert [cell["name"] for cell in plan["cells"]] == ["ar", "ddtree 7", "ddtree 31"]
    assert plan["eta_seconds"] > 0
    assert "--arm" in plan["services"][0]["argv"]
    assert not sweeper.results.exists()


def test_a_cell_s_rows_can_be_counted_by_hand(tmp_path: Path, sweeper: Sweeper) -> None:
    """Accept length is completion tokens over verify steps; a step is a chunk, or part of one on a busy
    machine.
    """
    assert sweeper(stub_sweep(tmp_path, "*:delay:2", arms=["ar", "dflash"])) == 0
    record = sweeper.cells()["dflash"]
    rows = sweeper.store.rows(record.key)
    steps = sum(row.verify_steps or 0 for row in rows)
    figure = next(cell for cell in sweeper.events[-1]["cells"] if cell["name"] == "dflash")
    assert figure["accept_length"] == pytest.approx(24 * 4 / steps)
    assert all(1 < len(row.chunk_tokens) <= (row.verify_steps or 0) + 1 for row in rows)
    assert all(row.chunk_tokens[0] == 1 or len(row.chunk_tokens) <= (row.verify_steps or 0) for row in rows)
