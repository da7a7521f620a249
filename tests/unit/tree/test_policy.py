import json

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder
from ddtree_engine.tree import policy
from ddtree_engine.tree.build import Builder, build_tree
from ddtree_engine.tree.calibration import parse_calibration
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.policy import AcceptEstimates, WidthPolicy, load_costs, parse_costs

WIDTHS = (16, 32, 64)
CALIBRATION = parse_calibration(
    {
        "schema": 1,
        "kind": "ddtree-calibration",
        "block": 16,
        "topk": 6,
        "logprob_floor": -12.0,
        "on": {"depth": [1.0 - 0.1 * d for d in range(15)], "rank": [0.5] + [-1.0] * 5, "slope": 0.8},
        "off": {"depth": [-0.5] * 15, "rank": [0.0] * 6, "slope": 0.5},
    }
)


def costs(seconds):
    return parse_costs({"schema": 1, "kind": "ddtree-step-costs", "seconds": seconds})


# A wide tree is nearly free alone and dear in a batch.
RISING = {
    "16": {"1": 0.020, "8": 0.024},
    "32": {"1": 0.0205, "8": 0.034},
    "64": {"1": 0.021, "8": 0.060},
}


@pytest.mark.parametrize("builder", list(Builder))
def test_a_narrower_tree_is_the_first_nodes_of_a_wider_one(builder):
    """What live estimates, and one draft for all widths, stand on."""
    rng = np.random.default_rng(0)
    calibration = CALIBRATION if builder is Builder.CALIBRATED else None
    for trial in range(6):
        # Few values, so that equal scores are met; an exhausted table in the last ones.
        topk = 6 if trial < 4 else 1
        steps = rng.integers(1, 5, (15, topk)) / 4
        logprobs = -np.cumsum(steps, axis=1).astype(np.float32)
        ids = np.stack([rng.permutation(50)[:topk] for _ in range(15)])

        def device_trees(width, ids=ids, logprobs=logprobs, topk=topk):
            build = TreeBuilder(16, topk, width - 1, builder, calibration, "cpu")
            return build(torch.tensor([7]), torch.from_numpy(ids)[None], torch.from_numpy(logprobs)[None])

        wide, wide_device = build_tree(7, ids, logprobs, 63, builder, calibration), device_trees(64)
        for width in (4, 8, 16, 32):
            tree, on_device = (
                build_tree(7, ids, logprobs, width - 1, builder, calibration),
                device_trees(width),
            )
            for name in ("tokens", "parents", "depths", "ranks", "scores"):
                assert np.array_equal(getattr(tree, name), getattr(wide, name)[: tree.width]), (width, name)
                assert torch.equal(getattr(on_device, name), getattr(wide_device, name)[:, :width])


def test_seconds_are_linear_between_and_beyond_what_was_measured():
    table = costs({"16": {"4": 0.03, "1": 0.01, "2": 0.02}, "32": {"2": 0.5}})
    assert [table.seconds(16, batch) for batch in (1, 3, 4, 6)] == pytest.approx([0.01, 0.025, 0.03, 0.04])
    assert table.seconds(32, 1) == table.seconds(32, 9) == 0.5
    falling = costs({"16": {"1": 0.02, "2": 0.01}})
    assert falling.seconds(16, 50) == 0.01


def test_estimates_are_the_mean_accept_lengths():
    found = AcceptEstimates(WIDTHS, half_life=1e9)
    found.add([[2, 3, 4], [4, 5, 6]])
    found.add([[3, 4, 8]])
    assert found.read() == pytest.approx([3, 4, 6])


def test_a_width_that_is_not_run_moves_with_the_text():
    found = AcceptEstimates(WIDTHS, half_life=10)
    for _ in range(20):
        found.add([[4, 5, 6]])
    for _ in range(200):
        found.add([[2]])
    assert found.read() == pytest.approx([2, 2.5, 3], rel=1e-3)
    assert found.seen.tolist() == [220, 20, 20]
    for _ in range(200):
        found.add([[2, 2, 4]])
    assert found.read() == pytest.approx([2, 2, 4], rel=1e-3)


def test_without_observations_nothing_is_estimated_above_one():
    found = AcceptEstimates(WIDTHS)
    assert found.read().tolist() == [1, 1, 1]
    found.add(np.zeros((0, 3)))
    assert found.read().tolist() == [1, 1, 1]


def run(chooser, steps, batch, lengths):
    """Choose and observe `steps` times; returns the widths."""
    taken = []
    for _ in range(steps):
        width = chooser.choose(batch)
        taken.append(width)
        chooser.observe([lengths[: WIDTHS.index(width) + 1]] * batch)
    return taken


def test_wide_trees_alone_and_narrow_ones_in_a_batch():
    chooser = WidthPolicy(WIDTHS, costs(RISING))
    lengths = [4.6, 5.0, 5.3]
    assert set(run(chooser, 100, 1, lengths)) == {64}
    in_batch = run(chooser, 400, 8, lengths)
    assert in_batch[0] == 16
    # Probes take little: the widest costs 2.5 times the narrowest here.
    assert 1 <= in_batch.count(64) <= 2
    assert set(in_batch) == {16, 64}
    assert chooser.present() == {1: 64, 8: 16}
    assert chooser.choose(1) == 64


def test_it_is_never_far_from_the_best_fixed_width():
    """Probes and hysteresis included, warm-up left out: at least 98 % of the best rate."""
    rng = np.random.default_rng(1)
    for batch in (1, 2, 4, 8):
        chooser = WidthPolicy(WIDTHS, costs(RISING))
        tokens, seconds = 0.0, 0.0
        fixed = np.zeros(len(WIDTHS))
        for step in range(3000):
            shown = 1 + np.sort(rng.integers(0, [[6], [8], [10]], (3, batch)), axis=0)
            width = chooser.choose(batch)
            at = WIDTHS.index(width)
            chooser.observe(shown[: at + 1].T)
            if step >= 100:
                tokens += shown[at].mean()
                seconds += chooser.costs.seconds(width, batch)
                fixed += shown.mean(1)
        rates = fixed / 2900 / [chooser.costs.seconds(width, batch) for width in WIDTHS]
        assert tokens / seconds >= 0.98 * rates.max(), batch


def test_starts_wide_until_it_has_seen_something():
    chooser = WidthPolicy(WIDTHS, costs(RISING))
    assert {chooser.choose(8) for _ in range(50)} == {64}
    chooser.observe([[4, 4, 4]] * policy.WARM_UP)
    assert chooser.choose(8) == 16


def test_a_small_gain_changes_nothing_and_a_large_one_only_after_a_while():
    flat = {str(width): {"1": 0.020} for width in WIDTHS}
    chooser = WidthPolicy(WIDTHS, costs(flat))
    chooser.estimates = AcceptEstimates(WIDTHS, half_life=1)
    chooser.observe([[5, 5, 5]] * policy.WARM_UP)
    assert chooser.choose(1) == 16
    for _ in range(40):
        chooser.observe([[5, 5.0, 5.0 * (1 + policy.MARGIN / 2)]])
        assert chooser.choose(1) == 16
    chooser.observe([[5, 5, 6]] * 40)
    assert chooser.choose(1) == 64
    chooser.observe([[5, 6, 6]] * 40)
    # Now 32 and 64 promise the same: it stays.
    assert {chooser.choose(1) for _ in range(20)} == {64}
    dear = WidthPolicy(WIDTHS, costs(RISING))
    dear.estimates = AcceptEstimates(WIDTHS, half_life=1)
    dear.observe([[5, 5, 5]] * policy.WARM_UP)
    first = dear.choose(1)
    dear.observe([[5, 9, 18]] * 40)
    assert [dear.choose(1) for _ in range(policy.DWELL + 1)] == [first] * policy.DWELL + [64]


def test_two_ranks_that_see_the_same_choose_the_same():
    choosers = [WidthPolicy(WIDTHS, costs(RISING)) for _ in range(2)]
    rng = np.random.default_rng(3)
    for _ in range(500):
        batch = int(rng.integers(1, 9))
        widths = {chooser.choose(batch) for chooser in choosers}
        assert len(widths) == 1
        shown = np.sort(rng.integers(1, 9, (batch, 3)), axis=1)[:, : WIDTHS.index(widths.pop()) + 1]
        for chooser in choosers:
            chooser.observe(shown)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "top level.*found 'list', allowed is a JSON object"),
        ({"schema": 2}, "schema: found 2, allowed is 1"),
        ({"schema": 1, "kind": "x"}, "kind: found 'x', allowed is 'ddtree-step-costs'"),
        ({"seconds": {}}, "seconds: found {}, allowed is an object of widths"),
        ({"seconds": {"a": {"1": 1}}}, "seconds: found 'a', allowed is widths"),
        ({"seconds": {"16": []}}, r"seconds\.16: found \[\], allowed is an object of batch sizes"),
        ({"seconds": {"16": {"0": 1}}}, r"seconds\.16: found '0', allowed is batch sizes"),
        ({"seconds": {"16": {"1": 0}}}, r"seconds\.16\.1: found 0, allowed is seconds above 0"),
        ({"seconds": {"16": {"1": True}}}, r"seconds\.16\.1: found True"),
        ({"seconds": {"16": {"1": float("nan")}}}, r"seconds\.16\.1: found nan"),
    ],
)
def test_a_wrong_table_is_named(data, said, tmp_path):
    whole = {"schema": 1, "kind": "ddtree-step-costs", **data} if isinstance(data, dict) else data
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(TreeInputError, match=f"costs.json: {said}" if data else said):
        load_costs(path)


def test_an_unreadable_table_and_a_missing_width_are_named(tmp_path):
    with pytest.raises(TreeInputError, match=r"none\.json: cannot be read"):
        load_costs(tmp_path / "none.json")
    with pytest.raises(TreeInputError, match="found no seconds for width 64, allowed are tables of all of"):
        WidthPolicy(WIDTHS, costs({"16": {"1": 1}, "32": {"1": 1}}))
