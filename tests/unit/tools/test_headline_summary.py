"""The committed summary of the 27B-cost run follows from its raw answers, and the page tells what it says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import headline_summary
from engine import headline_figures

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "results" / "h200-27b"
FOUND = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "h200-27b.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made():
    return headline_summary.summary(FOLDER)


def test_the_summary_follows_from_the_raw_answers(made):
    assert made == FOUND


def test_every_measured_target_names_a_file_that_is_there():
    for target in FOUND["targets"]:
        assert (target["raw"] is None) == (target["figure"] is None)
        assert target["raw"] is None or (FOLDER / target["raw"]).is_file()
        assert target["detail"]


def test_the_page_has_the_summarys_numbers():
    figures = FOUND["figures"]
    against = {name: figures[name]["in-flight-1"] for name in ("dflash", "ar")}
    for way in ("15", "31", "63", "auto"):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {way} |")).replace("*", "")
        if way != "auto":
            assert f"| {figures['dflash']['step_ratio'][way]['median']:.3f} |" in row
        assert f"| {against['dflash']['accept_length'][way]:.2f} |" in row
        assert "| {ratio:.2f} [{low:.2f}, {high:.2f}] |".format(**against["dflash"]["ratio"][way]) in row
        # Four prompts: a ratio, and no interval.
        assert against["ar"]["ratio"][way]["low"] is None
        assert row.endswith("| {ratio:.2f} |".format(**against["ar"]["ratio"][way]))
    headline = FOUND["headline"]["ddtree_over_best_linear"]
    assert "**{ratio:.2f} [{low:.2f}, {high:.2f}] x DFLASH**".format(**headline) in PAGE
    for row in FOUND["targets"]:
        if row["figure"] is not None and row["direction"] == "max" and row["target"] > 1:
            assert f"{row['figure']:.3f}" in PAGE


def test_the_page_has_the_earlier_runs_numbers():
    budgets = ["7", "15", "31", "63"]
    raw = headline_summary.load(FOLDER / "raw" / "three_launches")["dflash"]
    found = headline_figures.arm_figures(raw)
    text = " ".join(PAGE.split())
    steps = [found["step_ratio"][budget]["median"] for budget in budgets]
    assert "{:.3f}, {:.3f}, {:.3f} and {:.3f} for".format(*steps) in text
    alone = [found["in-flight-1"]["ratio"][budget]["ratio"] for budget in budgets]
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} times".format(*alone) in text
    later = [row for row in raw["in-flight-4"] if row["group"]]
    for four in headline_figures.throughput_figures(later)["ratio"].values():
        assert "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**four) in text


def test_no_raw_answer_names_a_folder_of_the_host():
    for run in ("main", "three_launches"):
        text = json.dumps(headline_summary.load(FOLDER / "raw" / run))
        assert not re.search(r'"/(root|home|work|opt|tmp)\b', text)


def test_an_archive_of_another_name_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["headline_summary.py", str(tmp_path), "archive.tar.xz"])
    with pytest.raises(SystemExit):
        headline_summary.main()
    assert "allowed is RUN=ARCHIVE" in capsys.readouterr().err
