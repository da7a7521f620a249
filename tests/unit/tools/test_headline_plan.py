"""What the headline plan asks of which servers, on stand-ins whose times and answers are known."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import headline_plan
from engine import headline_asking, headline_figures, headline_pair, profiles
from engine.headline_arms import SERVED
from engine.headline_sections import SECTIONS, Section

MS = {"linear": 20.0, "7": 20.2, "15": 20.4, "31": 21.0, "63": 22.0, "127": 25.0, "auto": 21.5}
ACCEPT = {"linear": 4, "7": 4, "15": 5, "31": 6, "63": 6, "127": 6, "auto": 6}
TEXTS = Section("dflash", "dflash", "texts", count=8, ways=("15", "31", "63"))


class Server:
    """Answers at once; a prefill takes 50 ms, a step and what it accepts depend on the budget asked for."""

    broken: frozenset[str] = frozenset()
    # Widths of trees that do not start, or beside which others find no memory.
    too_wide = too_large = 999
    # Servers that end when they are asked for tokens.
    dying: frozenset[str] = frozenset()
    # (server, way) -> first tokens of the prompts whose answers leave the others' at the fifth token.
    leaves: dict[tuple[str, str], set[int]] = {}  # noqa: RUF012
    leaves_for = 99
    started: list[Server] = []  # noqa: RUF012

    def __init__(self, context, name, arm, port, argv):
        self.name, self.arm, self.port, self.argv = name, arm, port, argv
        self.ready_after, self.stopped, self.settled, self.ended = None, False, False, False
        # Who was there when it began, and had taken its memory.
        there = [one.arm.width or 0 for one in self.started if not one.stopped]
        self.crowded = max(there, default=0) >= self.too_large
        self.beside = {one.name: one.settled for one in self.started if not one.stopped}
        self.temperatures = set()
        self.steps = 0
        self.started.append(self)

    def wait(self, limit):
        self.ready_after = 1.0
        self.settled = True
        return self.name not in self.broken and not self.crowded and (self.arm.width or 0) < self.too_wide

    def settle(self, limit):
        self.settled = True

    def why(self):
        return "CUDA out of memory" if self.crowded else "no error in the log"

    def stop(self):
        self.stopped = True

    def get(self, path):
        stages = {"sampled_steps": self.steps, "stage_seconds": {"draft": 0.002, "verify": 0.018}}
        return json.dumps({"internal_states": [{"ddtree": {"by_width": {"32": stages}}, "other": 1}]})

    def generate(self, ids, tokens, sampling=None, return_logprob=False, **more):
        if self.name in self.dying:
            self.ended = True
            raise ConnectionResetError(self.name)
        sampling = sampling or {}
        self.temperatures.add(sampling.get("temperature"))
        custom = sampling.get("custom_params")
        way = str(custom["ddtree_budget"]) if custom else "linear"
        accept = 1 if self.name == "ar" else ACCEPT[way]
        steps = -(-(tokens - 1) // accept)
        self.steps += steps
        meta = {"e2e_latency": (50 + steps * MS[way]) / 1e3}
        if self.name != "ar":
            meta["spec_verify_ct"] = steps
        if return_logprob:
            # The two best are an eighth apart, seen by the trees' server a sixteenth nearer to each other.
            second = -1.0625 if self.name == "ddtree" else -1.125
            meta["output_top_logprobs"] = [[[-1.0, ids[0], None], [second, 99, None]]] * tokens
            drift = 0.25 if self.name == "snapshot" else 0.5
            meta["output_token_logprobs"] = [[-1.0, ids[0], None]] * tokens
            scored = ids[more.get("logprob_start_len", 0) :]
            meta["input_token_logprobs"] = [[None, scored[0]], *([-1.0 - drift, one] for one in scored[1:])]
        output = [ids[0]] * tokens
        if len(ids) == 3 and ids[0] in self.leaves.get((self.name, way), ()):
            output[5:] = [self.leaves_for] * (tokens - 5)
        return {"output_ids": output, "meta_info": meta}


@pytest.fixture
def context(tmp_path, monkeypatch):
    options = argparse.Namespace(out=tmp_path, minutes=600, tokens=121, pair=tmp_path, costs=None)
    monkeypatch.setattr(headline_pair, "Server", Server)
    monkeypatch.setattr(Server, "started", [])
    raw = tmp_path / "raw"
    raw.mkdir()
    prompts = [[number, 1, 2] for number in range(80)]
    return headline_plan.HeadlineContext(options, site=tmp_path / "site", raw=raw, prompts=prompts)


def serve(context, *sections):
    return headline_plan.serve(context, context.site, list(sections))


def beside(name, kind="texts", **more):
    return next(one for one in SECTIONS if (one.beside, one.kind) == (name, kind) and one.size == 1)


def test_everything_is_asked_once_and_every_server_is_stopped(context, monkeypatch):
    monkeypatch.setattr(profiles, "take", lambda *asked, tokens: {"names": ["k"], "events": [[0, 0, 9]]})
    assert serve(context, *SECTIONS) == []
    assert context.left_over == []
    context.save()
    found = headline_plan.read(context.archive)
    for section in SECTIONS:
        if section.kind != "differences":
            assert found[section.beside][section.workload], section.name
    assert {row["way"] for row in found["ar"]["differences"]} >= {"15", "31", "dflash", "chain"}
    assert all(server.stopped for server in Server.started)
    names = [server.name for server in Server.started]
    # The trees' server starts a second time with the seconds that were measured beside plain decoding.
    assert names == [
        *("ar", "ddtree", "dflash", "ddtree", "chain", "snapshot", "unsafe", "shadow"),
        *("dflash-alone", "dflash-fp8", "ddtree-fp8"),
    ]
    # Who is to be alone is; nobody else needs more than one beside it.
    assert [len(server.beside) for server in Server.started] == [0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1]
    assert len({server.port for server in Server.started}) == len(names)
    figures = headline_figures.figures_of(found)
    assert set(figures) == set(names) - {"ddtree", "ddtree-fp8"}
    assert figures["dflash"]["step_ratio_8k"]["31"]["median"] == pytest.approx(1.05)
    assert figures["chain"]["in-flight-16"]["groups"] == 5


def test_servers_that_are_asked_together_are_never_three(context):
    serve(context, *(beside(name) for name in ("ar", "dflash", "snapshot", "dflash-fp8")))
    assert [sorted(server.beside) for server in Server.started] == [
        [], ["ar"], ["ddtree"], ["ddtree"], [], ["dflash-fp8"],
    ]  # fmt: skip
    # Whoever starts looks how much memory is left: the one before has taken its own.
    assert all(all(server.beside.values()) for server in Server.started)


@pytest.mark.parametrize("linear", ["ar", "dflash", "chain"])
def test_steps_and_throughput_of_every_budget_against_a_linear_arm(linear, context):
    ways = ("15", "31", "63")
    steps = Section("dflash", linear, "steps", count=3, ways=ways)
    texts = Section("dflash", linear, "texts", count=8, ways=ways)
    pair = headline_pair.Pair(context, context.site)
    for section in (steps, texts):
        headline_asking.ASKING[section.kind](context, section, *pair.serve(linear), 0.0)
    figures = headline_figures.arm_figures(context.results[linear])
    assert figures["step_ratio"]["31"]["median"] == pytest.approx(1.05)
    assert figures["step_ms"]["linear"] == pytest.approx(20.0)
    assert figures["stages"]["32"]["verify"] == pytest.approx(18.0)
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


def test_the_policys_table_is_estimated_first_and_measured_for_the_second_start(context, tmp_path):
    context.options.costs = tmp_path / "known.json"
    context.options.costs.write_text(json.dumps({"seconds": {"32": {"4": 0.5}}}))
    plain = [one for one in SECTIONS if one.beside == "ar" and one.kind == "steps"]
    serve(context, *plain, beside("dflash"))
    first, second = (server for server in Server.started if server.name == "ddtree")
    assert [server.arm.config["budget"] for server in (first, second)] == ["auto", "auto"]
    estimated, measured = (
        json.loads(Path(server.arm.config["costs"]).read_text())["seconds"] for server in (first, second)
    )
    assert set(estimated) == set(measured) == {"8", "16", "32", "64", "128"}
    assert estimated["32"]["4"] == 0.5
    assert estimated["128"]["16"] > estimated["128"]["1"]
    assert measured["32"] == pytest.approx({"1": 0.021, "4": 0.021, "16": 0.021})


def test_without_measured_seconds_the_trees_go_on_with_estimates(context):
    serve(context, beside("ar"), beside("dflash"))
    assert [server.name for server in Server.started] == ["ar", "ddtree", "dflash"]


def test_a_run_goes_by_an_earlier_ones_plain_decoding(context):
    serve(context, *(one for one in SECTIONS if one.beside == "ar"))
    context.save()
    earlier = headline_plan.read(context.archive)
    context.results.clear()
    for path in context.raw.iterdir():
        path.unlink()
    Server.started.clear()
    headline_plan.recall(context, earlier)
    wanted = [one for one in SECTIONS if one.name in ("dflash.in-flight-1", "dflash.differences")]
    assert serve(context, *wanted, beside("chain")) == []
    # Its seconds are measured, so that the trees' server starts once.
    assert [server.name for server in Server.started] == ["dflash", "ddtree", "chain"]
    context.save()
    found = headline_plan.read(context.archive)
    assert set(found["ar"]) == {"differences"}
    assert {row["way"] for row in found["ar"]["differences"]} == {"15", "31", "63", "auto", "dflash"}


@pytest.mark.parametrize(("token", "near_ties"), [(99, 2), (98, 0)])
def test_a_first_difference_from_plain_decoding_is_a_near_tie_or_is_named(
    token, near_ties, context, monkeypatch
):
    monkeypatch.setattr(Server, "leaves", {("ddtree", "31"): {2, 5}, ("dflash", "linear"): {3}})
    monkeypatch.setattr(Server, "leaves_for", token)
    wanted = [one for one in SECTIONS if one.beside in ("ar", "dflash") and one.kind == "differences"]
    assert serve(context, beside("ar"), beside("dflash"), *wanted) == []
    found = headline_figures.figures_of(context.results)["ar"]["differences"]
    assert found["noise"] == pytest.approx(0.0625)
    ways = found["by_way"]
    assert ways["63"] == {"answers": 40, "equal": 40, "near_ties": 0, "others": []}
    assert (ways["31"]["equal"], ways["31"]["near_ties"]) == (38, near_ties)
    # Budgets that were asked beside plain decoding are counted once, the others beside DFLASH.
    assert ways["15"]["answers"] == ways["dflash"]["answers"] == 40
    assert ways["dflash"]["equal"] == 39
    # A token that is not among the best is no near-tie.
    assert ways["31"]["others"] == ([] if near_ties else [[2, 5, None], [5, 5, None]])


def test_stored_and_replayed_states_over_a_long_text(context, monkeypatch):
    monkeypatch.setattr(Server, "leaves", {("snapshot", "31"): {0}})
    assert serve(context, beside("snapshot", "long")) == []
    found = headline_figures.figures_of(context.results)["snapshot"]["long"]
    assert found["tokens"] == 4000
    assert found["first_difference"] == [5]
    assert found["gap_there"] == [0.0625]
    assert found["wy"]["drift"] == pytest.approx([0.5] * 8)
    assert found["snapshot"]["drift"] == pytest.approx([0.25] * 8)
    assert found["wy"]["accept_length"] == pytest.approx(6, abs=0.01)


def test_a_temperature_is_asked_of_every_way_of_its_section_only(context):
    warm = next(one for one in SECTIONS if one.temperature)
    serve(context, warm, beside("dflash"))
    for server in Server.started:
        assert server.temperatures == {None, 0.7}
    assert {"in-flight-1", "in-flight-1-t0.7"} <= set(context.results["dflash"])


def test_long_prompts_differ_and_have_their_length(context):
    section = next(one for one in SECTIONS if one.length and one.kind == "texts")
    prompts = [group[0] for group in headline_asking._groups(context, section)]
    assert {len(prompt) for prompt in prompts} == {section.length}
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) >= headline_figures.LEAST_GROUPS


def test_gaps_of_a_trace_are_the_hosts_and_pauses_inside_of_a_graph_are_not():
    us = 1000
    events = [[0, 0, 10 * us], [1, 5 * us, 20 * us], [0, 26 * us, 24 * us], [1, 80 * us, 20 * us]]
    short = headline_asking.in_short({"names": ["a", "b"], "events": events})
    assert short == {
        "span": 100 * us,
        "busy": 69 * us,
        "gaps": [30 * us],
        "kernels": {"a": [2, 34 * us], "b": [2, 40 * us]},
    }
    found = headline_figures.gap_figures(short)
    assert (found["host_gap_share"], found["idle_share"]) == pytest.approx((0.3, 0.31))
    assert list(found["kernel_share"]) == ["b", "a"]


def test_what_fails_costs_itself_only(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", frozenset({"chain"}))
    assert serve(context, beside("dflash"), beside("chain"), beside("snapshot")) == ["chain"]
    assert context.results["snapshot"]["in-flight-1"]
    assert all(server.stopped for server in Server.started)


def test_without_the_widest_trees_all_others_are_asked(context, monkeypatch):
    monkeypatch.setattr(Server, "too_wide", 128)
    plain = [one for one in SECTIONS if one.beside == "ar"]
    assert serve(context, *plain, beside("dflash"), beside("chain")) == []
    assert [server.name for server in Server.started] == [
        *("ar", "ddtree", "ddtree", "dflash", "ddtree", "chain"),
    ]
    assert "128 nodes: ddtree did not start" in context.left_over
    assert set(context.results["ar"]["steps"][0]) == {"linear", "7", "15", "31", "63", "auto"}
    assert {row["way"] for row in context.results["chain"]["in-flight-1"]} == {"linear", "7", "15", "31"}
    # Seconds that were not measured stay estimated: its server asks for those of its widths only.
    costs = json.loads(Path(Server.started[-2].arm.config["costs"]).read_text())["seconds"]
    assert set(costs) >= {"8", "16", "32", "64"}
    assert costs["64"] == pytest.approx({"1": 0.022, "4": 0.022, "16": 0.022})


def test_an_arm_that_finds_no_memory_starts_again_beside_narrower_trees(context, monkeypatch):
    monkeypatch.setattr(Server, "too_large", 128)
    assert serve(context, beside("ar"), beside("dflash")) == []
    names = ["ar", "ddtree", "dflash", "dflash", "ddtree"]
    assert [server.name for server in Server.started] == names
    assert [server.arm.width for server in Server.started if server.name == "ddtree"] == [128, 64]
    assert context.results["dflash"]["in-flight-1"]


def test_trees_that_do_not_start_end_their_sections_only(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", frozenset({"ddtree"}))
    assert serve(context, beside("ar"), beside("dflash"), beside("dflash-fp8")) == ["ddtree"]
    assert "in-flight-1" in context.results["dflash-fp8"]
    assert "dflash" not in context.results


def test_a_server_that_ends_is_started_again_for_the_next_section(context, monkeypatch):
    monkeypatch.setattr(Server, "dying", frozenset({"dflash"}))
    failed = serve(context, beside("dflash"), beside("dflash", "steps"))
    assert failed == ["dflash.steps", "dflash.in-flight-1"]
    assert [server.name for server in Server.started] == ["dflash", "ddtree", "dflash"]
    # What had been answered is kept.
    assert context.results["dflash"]["in-flight-1"] == []


def test_a_section_that_is_slow_takes_no_time_of_more_important_ones(context, monkeypatch):
    left = iter(range(900, 0, -2))
    monkeypatch.setattr(headline_plan.HeadlineContext, "seconds_left", lambda self: float(next(left)))
    asked = [one for one in SECTIONS if one.name in ("dflash.in-flight-1-8k", "chain.in-flight-1")]
    context.prompts = context.prompts[:40]
    assert serve(context, *asked) == []
    assert context.results["chain"]["in-flight-1"]


@pytest.mark.parametrize("name", list(SERVED))
def test_every_arm_is_served_by_the_beds_classes(name, context):
    environment = context.environment(SERVED[name].arm, name)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "ddtree_engine.bed.sglang_models"


def test_a_dry_run_starts_nothing_and_tells_what_is_left_over(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["headline_plan.py", "--dry-run", "--sections", "plain,fp8", "--minutes", "8"]
    )
    assert headline_plan.main() == 0
    told = capsys.readouterr().out
    assert "ar starts" in told
    assert "left over: ar.steps-4, ar.steps-16, dflash-fp8.steps, dflash-fp8.in-flight-1" in told


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headline_plan.py", "--sections", "plain,nothing"])
    with pytest.raises(SystemExit):
        headline_plan.main()
    assert "found nothing, allowed are plain, dflash" in capsys.readouterr().err
