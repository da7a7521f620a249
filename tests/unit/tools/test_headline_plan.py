"""What the headline plan measures and how it judges, on servers whose times and answers are known."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from ddtree_ops.compare.statistics import MIN_PROMPTS

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import headline_plan
from engine import headline_figures

MS = {"linear": 20.0, "15": 20.4, "31": 21.0, "63": 22.0, "auto": 21.5}
ACCEPT = {"linear": 4, "15": 5, "31": 6, "63": 6, "auto": 6}


class Server:
    """Answers at once; a prefill takes 50 ms, a step and what it accepts depend on the budget asked for."""

    broken: frozenset[str] = frozenset()
    # (server, way) -> first tokens of the prompts whose answers leave the others' at the fifth token.
    leaves: dict[tuple[str, str], set[int]] = {}  # noqa: RUF012
    leaves_for = 99
    started: list[Server] = []  # noqa: RUF012

    def __init__(self, context, name, arm, port, argv):
        self.name, self.arm, self.port, self.argv = name, arm, port, argv
        self.ready_after, self.stopped = None, False
        self.started.append(self)

    def wait(self, limit):
        self.ready_after = 1.0
        return self.name not in self.broken

    def why(self):
        return "no error in the log"

    def stop(self):
        self.stopped = True

    def get(self, path):
        return json.dumps({"internal_states": [{"ddtree": {"widths": [8, 16, 32, 64]}}]})

    def generate(self, ids, tokens, sampling=None, return_logprob=False, top_logprobs_num=0):
        custom = (sampling or {}).get("custom_params")
        way = str(custom["ddtree_budget"]) if custom else "linear"
        accept = 1 if self.name == "ar" else ACCEPT[way]
        steps = -(-(tokens - 1) // accept)
        meta = {"e2e_latency": (50 + steps * MS[way]) / 1e3}
        if self.name != "ar":
            meta["spec_verify_ct"] = steps
        if return_logprob:
            # The two best are an eighth apart, seen by the trees' server a sixteenth nearer to each other.
            second = -1.0625 if self.name == "ddtree" else -1.125
            meta["output_top_logprobs"] = [[[-1.0, ids[0], None], [second, 99, None]]] * tokens
        output = [ids[0]] * tokens
        if len(ids) == 3 and ids[0] in self.leaves.get((self.name, way), ()):
            output[5:] = [self.leaves_for] * (tokens - 5)
        return {"output_ids": output, "meta_info": meta}


@pytest.fixture
def context(tmp_path, monkeypatch):
    options = argparse.Namespace(
        out=tmp_path,
        minutes=60,
        rounds=3,
        tokens=121,
        pair=tmp_path,
        against=["dflash"],
        bundle="",
        costs=None,
        in_flight=[1, 4],
    )
    monkeypatch.setattr(headline_plan, "Server", Server)
    monkeypatch.setattr(Server, "started", [])
    raw = tmp_path / "raw"
    raw.mkdir()
    prompts = [[number, 1, 2] for number in range(8)]
    return headline_plan.HeadlineContext(options, site=tmp_path / "site", raw=raw, prompts=prompts)


@pytest.mark.parametrize("linear", ["ar", "dflash", "chain"])
def test_steps_and_throughput_of_every_budget_against_a_linear_arm(linear, context):
    context.options.against = [linear]
    assert headline_plan.serve(context, context.site) == []
    context.save()
    figures = headline_figures.figures_of(headline_plan.read(context.archive))[linear]
    assert figures["step_ratio"]["31"]["median"] == pytest.approx(1.05)
    assert figures["step_ms"]["linear"] == pytest.approx(20.0)
    alone = figures["in-flight-1"]
    accept = 1 if linear == "ar" else 4
    expected = (50 + 120 / accept * 20.0) / (50 + 120 / 6 * 21.0)
    assert alone["groups"] == 8
    assert alone["ratio"]["31"]["ratio"] == pytest.approx(expected)
    # Every group gives the same ratio, so that the interval has no width.
    assert [alone["ratio"]["31"][end] for end in ("low", "high")] == pytest.approx([expected] * 2)
    assert alone["best"]["budget"] == 31
    assert "auto" not in alone
    assert ("linear" in alone["accept_length"]) == (linear != "ar")
    assert figures["in-flight-4"]["groups"] == 2
    assert figures["step_ratio_4"]["31"]["median"] == pytest.approx(1.05)
    assert [server.port for server in Server.started] == [30300, 30330]
    assert all(server.stopped for server in Server.started)


def test_a_second_linear_arm_takes_the_firsts_place_beside_the_same_trees(context):
    context.options.against = ["dflash", "ar"]
    assert headline_plan.serve(context, context.site) == []
    assert [server.name for server in Server.started] == ["dflash", "ddtree", "ar"]
    assert len({server.port for server in Server.started}) == 3
    figures = headline_figures.figures_of(context.results)
    assert set(figures) == {"dflash", "ar"}
    assert all(figures[name]["in-flight-1"]["groups"] == 8 for name in figures)


def test_with_costs_the_servers_own_choice_is_held_against_the_best_budget(context, tmp_path):
    context.options.costs = tmp_path / "costs.json"
    assert headline_plan.serve(context, context.site) == []
    trees = next(server for server in Server.started if server.name == "ddtree")
    assert trees.arm.config["budget"] == "auto"
    assert trees.arm.config["costs"] == str(context.options.costs)
    auto = headline_figures.figures_of(context.results)["dflash"]["in-flight-1"]["auto"]
    assert auto["budget"] == 31
    assert auto["ratio"] == pytest.approx((50 + 20 * 21.0) / (50 + 20 * 21.5))


@pytest.mark.parametrize(("token", "near_ties"), [(99, 2), (98, 0)])
def test_a_first_difference_from_plain_decoding_is_a_near_tie_or_is_named(
    token, near_ties, context, monkeypatch
):
    monkeypatch.setattr(Server, "leaves", {("ddtree", "31"): {2, 5}, ("dflash", "linear"): {3}})
    monkeypatch.setattr(Server, "leaves_for", token)
    context.options.against = ["dflash", "ar"]
    assert headline_plan.serve(context, context.site) == []
    found = headline_figures.figures_of(context.results)["ar"]["differences"]
    assert found["noise"] == pytest.approx(0.0625)
    ways = found["by_way"]
    assert ways["15"] == {"answers": 8, "equal": 8, "near_ties": 0, "others": []}
    assert (ways["31"]["equal"], ways["31"]["near_ties"]) == (6, near_ties)
    assert ways["dflash"]["equal"] == 7
    # A token that is not among the best is no near-tie.
    assert ways["31"]["others"] == ([] if near_ties else [[2, 5, None], [5, 5, None]])


def test_the_first_of_two_linear_arms_leaves_time_for_the_second(context, monkeypatch):
    left = iter(range(700, 0, -2))
    monkeypatch.setattr(headline_plan.HeadlineContext, "seconds_left", lambda self: float(next(left)))
    context.options.against = ["dflash", "ar"]
    context.options.rounds = 400
    assert headline_plan.serve(context, context.site) == []
    assert any(text.startswith("step rounds") for text in context.left_over)
    assert context.results["ar"]["in-flight-1"]


def test_a_budget_is_picked_on_one_half_and_judged_on_the_other():
    def group(slow):
        return {
            "linear": {"tokens": 100, "seconds": 1.0, "steps": 25},
            "15": {"tokens": 100, "seconds": 2.0 if slow else 0.5, "steps": 20},
            "31": {"tokens": 100, "seconds": 0.8, "steps": 20},
        }

    rows = [
        {"group": number, "way": way, **row}
        for number in range(10)
        for way, row in group(slow=number % 2 == 1).items()
    ]
    best = headline_figures.throughput_figures(rows, ["15", "31"])["best"]
    assert best == {"budget": 15, "ratio": 0.5, "low": 0.5, "high": 0.5}


def test_the_interval_holds_what_changes_between_groups():
    groups = [
        {"linear": {"tokens": 100, "seconds": 1.0}, "15": {"tokens": 100, "seconds": 1.0 / speed}}
        for speed in (0.8, 1.0, 1.1, 1.2, 1.4)
    ]
    found = headline_figures.interval(groups, "15")
    assert 0.8 <= found["low"] < found["ratio"] < found["high"] <= 1.4


def test_four_prompts_give_no_interval_as_in_reports():
    groups = [{"linear": {"tokens": 100, "seconds": 1.0}, "15": {"tokens": 100, "seconds": 0.5}}] * 4
    assert headline_figures.interval(groups, "15") == {"ratio": 2.0, "low": None, "high": None}
    assert headline_figures.interval([*groups, groups[0]], "15") == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert headline_figures.LEAST_GROUPS == MIN_PROMPTS


def test_a_group_that_not_every_way_was_asked_is_left_out():
    rows = [
        {"group": number, "way": way, "tokens": 100, "seconds": 1.0, "steps": 25}
        for number in range(3)
        for way in ("linear", "15")
    ]
    assert headline_figures.throughput_figures(rows[:-1], ["15"])["groups"] == 2


def test_a_server_that_does_not_start_is_named_and_the_other_is_stopped(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", frozenset({"ddtree"}))
    assert headline_plan.serve(context, context.site) == ["ddtree"]
    assert [server.name for server in Server.started] == ["dflash", "ddtree"]
    assert all(server.stopped for server in Server.started)


def test_every_arm_is_served_by_the_beds_classes(context):
    headline_plan.serve(context, context.site)
    for server in Server.started:
        environment = context.environment(server.arm, server.name)
        assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "ddtree_engine.bed.sglang_models"


@pytest.mark.parametrize(("running", "graphs"), [(1, "1"), (4, "1 2 4"), (6, "1 2 4 6"), (16, "1 2 4 8 16")])
def test_servers_are_made_for_the_most_requests_in_flight(running, graphs, context):
    context.options.in_flight = [1, running]
    headline_plan.serve(context, context.site)
    for server in Server.started:
        text = " ".join(server.argv)
        assert f"--max-running-requests {running} " in text
        assert f"--cuda-graph-bs-decode {graphs}" in text
        assert f"--max-mamba-cache-size {2 * running} " in text
