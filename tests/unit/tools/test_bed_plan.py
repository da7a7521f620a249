"""What the bed plan measures and how it judges, on servers whose times and answers are known."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import bed_plan
from engine import host


class Server:
    """Answers at once; a step takes `ms[kind]` and brings `accept[kind]` tokens, a prefill takes 50 ms."""

    ms = {"dummy": 20.0, "bed": 20.1, "small": 2.0}  # noqa: RUF012
    accept = {"dummy": 1, "bed": 4, "small": 4}  # noqa: RUF012
    broken: frozenset[str] = frozenset()
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, context, name, arm, port, argv):
        self.name, self.arm = name, arm
        self.algorithm, self.kind = name.split("-")
        self.ready_after = None
        self.stopped = False

    def wait(self, limit):
        self.ready_after = 1.0
        return self.name not in self.broken

    def why(self):
        return "no error in the log"

    def stop(self):
        self.stopped = True

    def generate(self, ids, tokens, **options):
        self.asked.append(self.name)
        accept = self.accept[self.kind] if self.algorithm == "dflash" else 1
        steps = -(-(tokens - 1) // accept)
        meta = {"e2e_latency": (50 + steps * self.ms[self.kind]) / 1e3}
        if self.algorithm == "dflash":
            meta["spec_verify_ct"] = steps
        if options:
            shift = 0.01 if self.kind == "bed" else 0.0
            meta["input_token_logprobs"] = [[None, ids[0], None]] + [[-1.0 - shift, i, None] for i in ids[1:]]
        # One of the two prompts parts in the bed.
        parts = self.kind == "bed" and ids[0] == 7
        return {"output_ids": [ids[0]] * (tokens - 1) + [9 if parts else 5], "meta_info": meta}


@pytest.fixture
def context(tmp_path, monkeypatch):
    options = argparse.Namespace(
        out=tmp_path, minutes=60, rounds=4, tokens=33, pair=tmp_path, arms="ar,dflash", bundle=""
    )
    monkeypatch.setattr(bed_plan, "Server", Server)
    monkeypatch.setattr(Server, "asked", [])
    raw = tmp_path / "raw"
    raw.mkdir()
    return bed_plan.BedContext(options, site=tmp_path / "site", raw=raw, prompts=[[6, 1, 2], [7, 1, 2]])


def test_a_step_is_timed_without_its_prefill_and_at_as_many_steps(context):
    rows = bed_plan.rounds(
        context, *(Server(context, f"dflash-{kind}", None, 0, []) for kind in ("dummy", "bed"))
    )
    assert len(rows) == 4
    for row in rows:
        assert row["dummy_ms"] == pytest.approx(20.0)
        assert row["bed_ms"] == pytest.approx(20.1)
        assert row["steps"][0] == pytest.approx(row["steps"][1], abs=3)
    # Who is asked first changes; two requests a time, after two for warming each.
    order = Server.asked[4:]
    assert order[:4] == ["dflash-dummy"] * 2 + ["dflash-bed"] * 2
    assert order[4:8] == ["dflash-bed"] * 2 + ["dflash-dummy"] * 2


def test_figures_of_both_arms(context):
    for name in ("ar", "dflash"):
        assert bed_plan.serve_arm(context, context.site, name, 30000) == []
    assert bed_plan.judge(context) == []
    figures = json.loads((context.raw / "figures.json").read_text())
    for name in ("ar", "dflash"):
        row = figures[name]
        assert row["step_ratio"]["median"] == pytest.approx(1.005)
        assert row["step_ratio"]["within"]
        assert row["logprob_change"] == {"median": pytest.approx(0.01), "largest": pytest.approx(0.01)}
        assert row["identical"] == [1, 2]
    assert figures["ar"]["accept_length"] == {"bed": None, "small": None}
    assert figures["dflash"]["accept_length"] == {"bed": 4.0, "small": 4.0}


@pytest.mark.parametrize("ms", [20.3, 19.7])
def test_a_bed_that_costs_something_else_fails(ms, context, monkeypatch):
    monkeypatch.setattr(Server, "ms", Server.ms | {"bed": ms})
    bed_plan.serve_arm(context, context.site, "ar", 30000)
    assert bed_plan.judge(context) == ["ar.step_ratio"]


def test_a_server_that_does_not_start_is_named_and_the_others_are_stopped(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", frozenset({"ar-bed"}))
    started = []
    original = Server.__init__

    def remember(self, *arguments):
        original(self, *arguments)
        started.append(self)

    monkeypatch.setattr(Server, "__init__", remember)
    assert bed_plan.serve_arm(context, context.site, "ar", 30000) == ["ar-bed"]
    assert [server.kind for server in started] == ["dummy", "bed", "small"]
    assert all(server.stopped for server in started)
    assert bed_plan.judge(context) == []


def test_what_there_is_no_time_for_is_left_over(context):
    context.options.minutes = 3
    assert bed_plan.serve_arm(context, context.site, "ar", 30000) == []
    assert context.left_over == ["ar"]


def test_every_kind_is_served_by_the_beds_classes(context):
    for name in bed_plan.ALGORITHMS:
        environment = context.environment(bed_plan.arm_of(name), name)
        assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "ddtree_engine.bed.sglang_models"


def test_the_bed_is_written_by_the_users_command(context, monkeypatch):
    from ddtree_engine.reference import pair_path

    context.options.pair = pair_path()
    context.site.mkdir()
    host.install_plugin(context.site)
    folder = bed_plan.write_bed(context)
    assert (folder / "target" / "config.json").is_file()
    assert (folder / "drafter" / "model.safetensors").is_file()


def test_the_archive_has_a_name_of_its_own(context):
    context.keep("ar", "rounds", [])
    context.save()
    with tarfile.open(context.options.out / "bed.tar.xz") as archive:
        assert archive.getnames() == ["ar.rounds.json"]


def test_an_unknown_arm_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bed_plan.py", "--arms", "ar,tree"])
    with pytest.raises(SystemExit) as ended:
        bed_plan.parse_options()
    assert ended.value.code == 2
    assert "found tree, allowed are ar, dflash" in capsys.readouterr().err
