import json
from types import SimpleNamespace

import pytest
import torch
from ddtree_engine.sglang_plugin.chooser import WidthChooser, accept_lengths
from ddtree_engine.sglang_plugin.config import parse_config
from ddtree_engine.sglang_plugin.describe import WidthSeries, facts
from ddtree_engine.sglang_plugin.metrics import HostTap, StepOutcome
from ddtree_engine.sglang_plugin.requests import asked_budget, refusal
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from ddtree_engine.tree import policy

SECONDS = {"4": {"1": 0.010, "8": 0.012}, "8": {"1": 0.0101, "8": 0.020}}


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"schema": 1, "kind": "ddtree-step-costs", "seconds": SECONDS}))
    return str(path)


def asking(*budgets):
    """A batch's requests; None asks for nothing."""
    customs = [None if budget is None else {"ddtree_budget": budget} for budget in budgets]
    return [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom)) for custom in customs]


def outcome(path, accepted):
    nothing = torch.zeros(len(path), 1, dtype=torch.int64)
    tree = TreeBatch(nothing, nothing, nothing, nothing, nothing)
    return StepOutcome(tree, nothing, torch.tensor(path), torch.tensor(accepted), nothing[:, 0], None)


def test_a_narrower_tree_ends_where_the_path_leaves_its_nodes():
    # What lies behind the accepted nodes is not read, whatever it is.
    steps = outcome([[0, 2, 5, 7], [0, 1, -1, -1], [0, 6, 1, 1]], [4, 2, 2])
    assert accept_lengths(steps, [2, 4, 8]).tolist() == [[1, 2, 4], [2, 2, 2], [1, 1, 2]]


def test_the_largest_budget_that_is_asked_for_wins_also_over_auto(costs):
    chooser = WidthChooser(parse_config(json.dumps({"widths": [4, 8], "budget": "auto", "costs": costs})))
    assert chooser.choose(asking(3, None)) == 4
    assert chooser.choose(asking(3, 7, "auto")) == 8
    assert chooser.steps == {4: 1, 8: 1}


def test_nobody_asks_and_the_default_serves():
    assert WidthChooser(parse_config('{"widths": [4, 8]}')).choose(asking(None, None)) == 8
    assert WidthChooser(parse_config('{"widths": [4, 8], "budget": 3}')).choose(asking(None)) == 4


def finish(chooser, requests, path, accepted, times=1):
    for _ in range(times):
        width = chooser.choose(requests)
        chooser.note(width, outcome(path, accepted))
        chooser.processed()
    return width


@pytest.mark.parametrize("by_request", [True, False])
def test_auto_goes_by_what_the_steps_accepted(by_request, costs):
    keys = {"widths": [4, 8], "costs": costs, "budget": 7 if by_request else "auto"}
    chooser = WidthChooser(parse_config(json.dumps(keys)))
    batch = asking(*(["auto" if by_request else None] * 8))
    # The nodes 4..7 never matter: in a batch of eight the narrow tree is the better one.
    assert finish(chooser, batch, [[0, 1, 3]] * 8, [3] * 8, times=policy.WARM_UP // 8) == 8
    assert finish(chooser, batch, [[0, 1, 3]] * 8, [3] * 8) == 4
    read = chooser.read()
    assert read["policy"]["present"] == {"8": 4}
    assert read["policy"]["estimated_accept_length"] == {"4": 3.0, "8": 3.0}
    assert read["last_width"] == 4
    assert read["by_width"]["4"] == {"steps": 1, "requests": 8, "accept_length": 3.0}
    json.dumps(read)


def test_a_step_counts_when_its_result_is_processed_and_not_before():
    chooser = WidthChooser(parse_config('{"widths": [4, 8]}'))
    chooser.processed()
    chooser.note(chooser.choose(asking(None)), outcome([[0, 2, 5]], [3]))
    chooser.note(chooser.choose(asking(3)), outcome([[0, 1, 2]], [2]))
    assert chooser.read()["by_width"]["8"] == {"steps": 1, "requests": 0}
    chooser.processed()
    assert chooser.read()["by_width"]["8"] == {"steps": 1, "requests": 1, "accept_length": 3.0}
    assert chooser.read()["by_width"]["4"]["requests"] == 0
    chooser.processed()
    assert chooser.read()["by_width"]["4"] == {"steps": 1, "requests": 1, "accept_length": 2.0}
    assert "policy" not in chooser.read()


def test_the_oldest_step_is_taken_first():
    tap = HostTap()
    assert tap.take() is None
    tap.put({"step": 1}, {"x": torch.tensor([1])})
    tap.put({"step": 2}, {"x": torch.tensor([2])})
    assert [tap.take()[0]["step"] for _ in range(2)] == [1, 2]
    assert tap.take() is None


def request_with(**custom):
    parameters = SimpleNamespace(custom_params=custom or None)
    return SimpleNamespace(sampling_params=parameters)


def test_a_request_may_ask_for_what_was_captured_and_for_auto_where_there_are_costs(costs):
    plain = parse_config('{"widths": [4, 8]}')
    priced = parse_config(json.dumps({"widths": [4, 8], "costs": costs}))
    for config in (plain, priced):
        assert refusal(request_with(ddtree_budget=3), config) is None
        assert refusal(request_with(), config) is None
        for wrong in (8, 4, 0, True, 3.0, "3", None):
            assert "allowed are 3, 7" in refusal(request_with(ddtree_budget=wrong), config)
    assert refusal(request_with(ddtree_budget="auto"), priced) is None
    assert "found 'auto', allowed are 3, 7:" in refusal(request_with(ddtree_budget="auto"), plain)
    assert asked_budget(request_with(ddtree_budget=3)) == 3
    assert asked_budget(request_with()) is None


def test_only_a_server_of_several_widths_says_so():
    several = facts(parse_config('{"widths": [4, 8], "budget": 3}'), width=8, block=16)
    assert (several["budget"], several["budgets"], several["widths"]) == (7, [3, 7], [4, 8])
    assert several["default_budget"] == 3
    one = facts(parse_config("{}"), width=8, block=16)
    assert not {"budgets", "widths", "default_budget"} & one.keys()


def test_prometheus_counts_steps_by_width():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    chooser = WidthChooser(parse_config('{"widths": [4, 8]}'))
    series = WidthSeries(chooser.widths, registry)
    for budget in (3, 3, None):
        chooser.choose(asking(budget))
        series.update(chooser.read())

    def value(name, **labels):
        return registry.get_sample_value(f"ddtree_{name}", labels)

    assert value("width_steps_total", width="4") == 2
    assert value("width_steps_total", width="8") == 1
    assert value("width_requests_total", width="8") == 0
    assert value("last_width") == 8
