"""The quickstart's and calibration's own work, over stub servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ddtree_engine.tree import load_calibration

from ddtree_ops.bench.calibrate import CalibrationJob, run_calibration
from ddtree_ops.bench.quickstart import QuickstartOptions, run_quickstart
from ddtree_ops.errors import BadEnvironment, BadInput, JobFailed
from ddtree_ops.output import Output, OutputMode
from tests.support.ops import STUB, write_checkpoint, write_prompts


def options(folder: Path, *faults: str) -> QuickstartOptions:
    return QuickstartOptions(
        out=folder / "quickstart",
        dataset=str(write_prompts(folder / "prompts.jsonl", 5)),
        prompts=5,
        max_tokens=24,
        model=write_checkpoint(folder / "target"),
        drafter=write_checkpoint(folder / "drafter", b"draft"),
        command=[*STUB, *(word for fault in faults for word in ("--fault", fault))],
    )


def test_the_quickstart_leaves_a_report_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_quickstart(options(tmp_path), Output(OutputMode.HUMAN))
    page = tmp_path / "quickstart" / "report" / "index.html"
    assert "<svg" in page.read_text()
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["schema"] == 1
    cells = {(cell["arm"], cell["budget"], cell["builder"]): cell for cell in summary["cells"]}
    assert len(cells) == 10
    assert {key[1] for key in cells if key[0] == "ddtree" and key[2] == "best-first"} == {7, 15, 31, 63}
    assert cells["ddtree", 31, "spine-first"]["gates"]["steps_below_spine"] == 0
    assert cells["unsafe", 31, "best-first"]["parity"]["different"] == 5
    for check in (
        "all_cells_complete",
        "shadow_equals_dflash",
        "ddtree_equals_ar",
        "spine_first_steps_below_spine_zero",
        "unsafe_fails_parity",
        "tree_kernels_ran",
    ):
        assert summary["checks"][check] is True, check
    assert summary["seconds"] > summary["sweep_seconds"] > 0
    printed = capsys.readouterr().out
    assert page.resolve().as_uri() in printed
    assert "not the point" in printed
    assert "unsafe 31 (wrong)" in printed


def test_a_quickstart_that_finds_a_fault_fails_with_its_report_written(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="gate cold-cache"):
        run_quickstart(options(tmp_path, "ddtree:cached:3"), Output(OutputMode.QUIET))
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["checks"]["all_cells_complete"] is False


def job(folder: Path, *faults: str, prompts: int = 9) -> CalibrationJob:
    return CalibrationJob(
        url=None,
        dataset=str(write_prompts(folder / "prompts.jsonl", prompts)),
        judge_dataset=None,
        prompts=None,
        max_tokens=64,
        model=write_checkpoint(folder / "target"),
        drafter=write_checkpoint(folder / "drafter", b"draft"),
        topk=8,
        threads=1,
        command=[*STUB, *(word for fault in faults for word in ("--fault", fault))],
    )


def test_a_calibration_is_fitted_judged_and_readable(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    judgement = run_calibration(job(tmp_path), out, Output(OutputMode.QUIET))
    calibration = load_calibration(out)
    assert (calibration.block, calibration.topk) == (16, 8)
    # The stub's drafter is right at rank 0 in 65 of 100 places, whatever it says of itself.
    top = calibration.on.depth[0] + calibration.on.rank[0] + calibration.on.slope * -1.2
    assert 1 / (1 + 2.718281828 ** -float(top)) == pytest.approx(0.65, abs=0.12)
    assert judgement["on"]["log_loss"] < judgement["on"]["log_loss_raw"]
    assert json.loads(out.read_text())["fit"]["judged"] == judgement


def test_fit_and_judgement_may_use_two_files_without_a_common_prompt(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "o", "text": "class A:"}\n')
    asked = replace(job(tmp_path, prompts=2), judge_dataset=str(other))
    out = tmp_path / "c.json"
    run_calibration(asked, out, Output(OutputMode.QUIET))
    assert json.loads(out.read_text())["fit"]["judge_dataset"] == "other.jsonl"
    other.write_text('{"id": "o", "text": "def f1(a, b):\\n"}\n')
    with pytest.raises(BadInput, match=r"1 prompts are in prompts\.jsonl and in other\.jsonl"):
        run_calibration(asked, out, Output(OutputMode.QUIET))


def test_a_server_without_steps_cannot_be_calibrated_on(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="p0: the server logs no steps"):
        run_calibration(job(tmp_path, "ddtree:no-steps"), tmp_path / "c.json", Output(OutputMode.QUIET))
    assert not (tmp_path / "c.json").exists()


def test_bad_calibration_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="found 2 prompts, allowed: 3 or more"):
        run_calibration(job(tmp_path, prompts=2), tmp_path / "c.json", Output(OutputMode.QUIET))
    with pytest.raises(BadInput, match="--out"):
        run_calibration(job(tmp_path), tmp_path / "none" / "c.json", Output(OutputMode.QUIET))
    away = replace(job(tmp_path), url="http://127.0.0.1:9")
    with pytest.raises(BadEnvironment, match="cannot be reached"):
        run_calibration(away, tmp_path / "c.json", Output(OutputMode.QUIET))
