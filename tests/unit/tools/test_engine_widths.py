"""The GPU plan's stage `widths`, on a server that answers as one of several widths would."""

import argparse
import io
import json
import sys
import urllib.error
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from ddtree_engine.tree.policy import load_costs
from engine import host, judgement, widths

PROMPTS = [[number, 2, 3] for number in range(5)]


class Server:
    """Tokens depend on the prompt only, steps on the budget; `wrong` budgets give other tokens."""

    name = "tree64-widths"

    def __init__(self, wrong=()):
        self.wrong = wrong
        self.asked = []

    def generate(self, ids, tokens, *, sampling):
        budget = sampling.get("custom_params", {}).get("ddtree_budget")
        self.asked.append(budget)
        shift = 1000 if budget in self.wrong else 0
        steps = {15: 8, 31: 4, 63: 2}.get(budget, 2)
        output = [ids[0] + place + shift for place in range(tokens)]
        return {"output_ids": output, "meta_info": {"spec_verify_ct": steps, "id": "x"}}

    def post(self, path, body):
        message = io.BytesIO(b"allowed are 15, 31, 63")
        raise urllib.error.HTTPError(path, 400, "bad", {}, message)

    def get(self, path):
        return json.dumps({"internal_states": [{"ddtree": {"last_width": 16}}]})


@pytest.fixture
def context(tmp_path):
    options = argparse.Namespace(pair=tmp_path, out=tmp_path, minutes=9.0, tokens=16)
    return host.Context(options, site=tmp_path, raw=tmp_path, prompts=PROMPTS)


def single(shift=0):
    return [
        {"output_ids": [ids[0] + place + shift for place in range(16)], "meta": {"spec_verify_ct": 4}}
        for ids in PROMPTS
    ]


def test_every_budget_is_forced_and_compared_with_the_arm_of_its_own(context):
    server = Server()
    context.results = {"tree64-widths": {"widths": widths.widths(context, server)}, "tree16": {}}
    for arm in ("tree16", "tree32", "tree64"):
        context.results[arm] = {"greedy": single()}
    compared = list(widths.comparisons(context.results, PROMPTS))
    assert {where for where, *_ in compared} == {
        "tree64-widths budget 15 against tree16",
        "tree64-widths budget 31 against tree32",
        "tree64-widths budget 63 against tree64",
        "tree64-widths mixed",
    }
    assert len(compared) == 3 * len(PROMPTS) + len(PROMPTS)
    assert all(mine == theirs for *_, mine, theirs in compared)
    line = widths.figures("tree64-widths", context.results)
    assert line["15"] == {"accept_length": [2.0, 4.0], "identical": "5/5"}
    assert line["63"]["accept_length"] == [8.0, 4.0]
    assert line["refused"] == [400, 400, 400]
    assert {15, 31, 63, None} <= set(server.asked)


def test_a_budget_that_gives_other_tokens_is_seen(context):
    context.results = {"tree64-widths": {"widths": widths.widths(context, Server(wrong=(31,)))}}
    context.results["tree32"] = {"greedy": single()}
    differing = [
        where for where, *_, mine, theirs in widths.comparisons(context.results, PROMPTS) if mine != theirs
    ]
    assert differing == ["tree64-widths budget 31 against tree32"] * len(PROMPTS)
    assert widths.figures("tree64-widths", context.results)["31"]["identical"] == "0/5"


def test_replayed_states_are_compared_with_replayed_ones():
    assert widths.single_arms("tree64-widths-wy")[15] == "tree16-wy"
    assert widths.single_arms("tree64-widths")[63] == "tree64"


def test_the_table_that_is_left_is_one_that_the_policy_reads(context):
    widths.widths(context, Server())
    costs = load_costs(context.raw / "tree64-widths.costs.json")
    assert sorted(costs.table) == [16, 32, 64]
    assert costs.seconds(16, 1) > 0


def test_the_policy_stands_beside_every_fixed_budget(context):
    found = widths.auto(context, Server())
    assert len(found["rows"]) == len(widths.SIZES) * 3 * 4
    assert set(found["best_fixed"]) == {"1", "2", "4", "8"}
    assert found["ddtree"] == {"last_width": 16}
    rates = {"auto": [90, 110], 15: [80, 80], 31: [125, 125], 63: [20, 300]}
    rows = [
        {"size": 1, "budget": way, "tokens_a_second": rate} for way, both in rates.items() for rate in both
    ]
    assert widths.against_fixed(rows) == {"1": 100 / 160}


def test_the_judgement_holds_the_stages_figures(context):
    context.results = {
        "tree64-widths": {"widths": widths.widths(context, Server())},
        "tree64-auto": {"auto": widths.auto(context, Server())},
    }
    judgement.judge(context)
    lines = context.results[context.judge]["figures"]
    assert lines["tree64-widths"]["widths"]["15"]["accept_length"] == [2.0]
    assert set(lines["tree64-auto"]["auto_over_best_fixed"]) == {"1", "2", "4", "8"}
    assert not any("budget 15" in where for where, *_ in judgement.comparisons(context))
    context.results["tree16"] = {"greedy": single()}
    assert any("budget 15" in where for where, *_ in judgement.comparisons(context))


def test_a_file_that_an_earlier_arm_left_is_found(context):
    from engine.arms import ARMS

    found = json.loads(context.environment(ARMS["tree64-auto"], "tree64-auto")["SGLANG_DDTREE_CONFIG"])
    assert found["costs"] == str(context.raw / "tree64-widths.costs.json")
    found = json.loads(context.environment(ARMS["tree32-log"], "tree32-log")["SGLANG_DDTREE_CONFIG"])
    assert found["step_log"] == str(context.raw / "tree32-log.steps")
