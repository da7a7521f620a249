import json

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin import metrics
from ddtree_engine.sglang_plugin.config import parse_config
from ddtree_engine.sglang_plugin.metrics import HostTap, StepCounters, StepOutcome
from ddtree_engine.sglang_plugin.requests import refusal
from ddtree_engine.sglang_plugin.shadow import ShadowScorer
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder
from ddtree_engine.sglang_plugin.watch import Watch
from ddtree_engine.tree import accept
from ddtree_engine.tree.build import Builder, build_tree
from ddtree_engine.tree.nodes import Tree

BLOCK, TOPK = 6, 3


def drafted(seed, requests=4):
    rng = np.random.default_rng(seed)
    ids = np.stack([np.stack([rng.permutation(9)[:TOPK] for _ in range(BLOCK - 1)]) for _ in range(requests)])
    logprobs = -np.sort(rng.exponential(1.0, (requests, BLOCK - 1, TOPK)).astype(np.float32), axis=-1)
    return ids, logprobs


def outcome_of(seed, budget, builder, seen=None):
    """Walk random target tokens through random trees: the device's view and the core's."""
    rng = np.random.default_rng(seed + 100)
    ids, logprobs = drafted(seed)
    trees = [build_tree(0, i, lp, budget, builder) for i, lp in zip(ids, logprobs, strict=True)]
    batch = TreeBuilder(BLOCK, TOPK, budget, builder, None, "cpu")(
        torch.zeros(len(ids), dtype=torch.int64), torch.from_numpy(ids), torch.from_numpy(logprobs)
    )
    truths = [[int(rng.choice(i[d], p=[0.7, 0.2, 0.1])) for d in range(BLOCK - 1)] + [8] for i in ids]
    depth = min(BLOCK, budget + 1)
    path = torch.full((len(ids), depth), -1)
    accepted, bonus = [], []
    for row, (tree, truth) in enumerate(zip(trees, truths, strict=True)):
        choices = np.array([truth[min(int(d), len(truth) - 1)] for d in tree.depths])
        walked = accept.walk(tree, choices)
        path[row, : len(walked.path)] = torch.tensor(walked.path)
        accepted.append(len(walked.path))
        bonus.append(walked.bonus)
    outcome = StepOutcome(
        tree=batch,
        spine=torch.from_numpy(ids[:, :, 0]),
        path=path,
        accepted=torch.tensor(accepted),
        bonus=torch.tensor(bonus),
        parents_seen=batch.parents.int() if seen is None else seen,
    )
    chains = [accept.chain_accept(i[:, 0], t) for i, t in zip(ids, truths, strict=True)]
    return outcome, chains


@pytest.mark.parametrize("seed", range(8))
def test_the_chain_inside_a_spine_first_tree_is_counted_exactly(seed):
    outcome, chains = outcome_of(seed, 15, Builder.SPINE_FIRST)
    matched, below = outcome.chain()
    assert matched.tolist() == chains
    assert not below.any()


def test_steps_below_their_own_chain_are_seen_in_other_trees():
    seen = 0
    for seed in range(40):
        outcome, chains = outcome_of(seed, 5, Builder.BEST_FIRST)
        matched, below = outcome.chain()
        for row, chain in enumerate(chains):
            accepted = int(outcome.accepted[row]) - 1
            # Where the tree ended before the chain did, one token more is known, no further.
            assert int(matched[row]) == min(chain, accepted + 1)
            assert bool(below[row]) == (chain > int(outcome.accepted[row]) - 1)
            seen += bool(below[row])
    assert seen


def test_counters_add_up_and_count_the_kernels_that_ran():
    counters = StepCounters(BLOCK, "cpu")
    outcome, chains = outcome_of(1, 15, Builder.SPINE_FIRST)
    assert counters.add(outcome).tolist() == chains
    wrong = outcome.tree.parents.clone().int()
    wrong[2, 3] = -7
    outcome, _ = outcome_of(1, 15, Builder.SPINE_FIRST, seen=wrong)
    counters.add(outcome)
    assert counters.read()["steps"] == 0  # nothing has been copied yet
    counters.start_copy()
    read = counters.read()
    assert (read["steps"], read["requests"], read["tree_kernel_requests"]) == (2, 8, 7)
    assert read["accepted"] == 2 * int(outcome.accepted.sum() - 4)
    assert sum(read["matched_histogram"]) == 8
    assert read["accept_length"] == 1 + read["accepted"] / 8


def test_a_tap_hands_out_values_as_they_were_when_they_were_put():
    tap, tensor = HostTap(), torch.tensor([1, 2])
    tap.put({"step": 1}, {"x": tensor})
    tensor += 10
    ((label, tensors),) = list(tap.arrived())
    assert (label["step"], tensors["x"].tolist()) == (1, [1, 2])
    assert list(tap.arrived()) == []


def steps_of(truth, start, tables):
    """DFLASH over a known text: (tree, committed tokens) of every step."""
    at, steps = start, []
    while at < len(truth) - BLOCK:
        ids, logprobs = tables(at)
        tree = build_tree(truth[at], ids, logprobs, 31)
        matched = accept.chain_accept(ids[:, 0], truth[at + 1 :])
        steps.append((at, tree, truth[at + 1 : at + 2 + matched]))
        at += matched + 1
    return steps


def test_shadow_scores_are_the_trees_own_accepts_along_the_text():
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 9, 120).tolist()

    def tables(at):
        ids = np.stack([rng.permutation(9)[:TOPK] for _ in range(BLOCK - 1)])
        for depth in range(BLOCK - 1):
            if rng.random() < 0.8 and truth[at + 1 + depth] not in ids[depth]:
                ids[depth, rng.integers(0, TOPK)] = truth[at + 1 + depth]
        return ids, np.log(np.array([[0.6, 0.25, 0.15]] * (BLOCK - 1), dtype=np.float32))

    steps = steps_of(truth, 0, tables)
    scorer = ShadowScorer(BLOCK - 1, 31)
    for _, tree, committed in steps:
        scorer.step("r", tree, committed)
    expected = [accept.tree_accept(tree, truth[at + 1 : at + BLOCK]) for at, tree, _ in steps]
    scored = scorer.scored
    assert scored >= len(steps) - BLOCK
    assert scorer.matched[31] == sum(expected[:scored])
    shorter = [Tree(*(part[:8] for part in vars(tree).values())) for _, tree, _ in steps]
    expected7 = [
        accept.tree_accept(tree, truth[at + 1 : at + BLOCK])
        for (at, _, _), tree in zip(steps, shorter, strict=True)
    ]
    assert scorer.matched[7] == sum(expected7[:scored])
    scorer.finish("r")
    assert scorer.scored <= len(steps)
    assert sum(scorer.histogram) == scorer.scored


def test_the_watch_logs_steps_and_closes_requests_after_their_last_step(tmp_path):
    config = parse_config(
        json.dumps({"mode": "shadow", "budget": 15, "topk": TOPK, "step_log": str(tmp_path)})
    )
    watch = Watch(config, BLOCK - 1, first_rank=True)
    ids, logprobs = drafted(0, requests=2)
    tree = TreeBuilder(BLOCK, TOPK, 15, Builder.BEST_FIRST, None, "cpu")(
        torch.tensor([1, 2]), torch.from_numpy(ids), torch.from_numpy(logprobs)
    )

    class Sampler:
        ids = torch.zeros(4, BLOCK - 1, TOPK, dtype=torch.int64)
        logprobs = torch.zeros(4, BLOCK - 1, TOPK)

    class Request:
        def __init__(self, rid):
            self.rid = rid

    class Batch:
        reqs = (Request("a"), Request("b"))
        seq_lens = torch.tensor([10, 20])

    watch.batch = Batch
    watch.log_chain_step(
        tree, Sampler, torch.tensor([2, 1]), torch.tensor([[3, 4, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    )
    watch.finish("a")
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["rid"], line["step"], line["prefix"], line["accepted"]) for line in lines] == [
        ("a", 1, 10, 2),
        ("b", 1, 20, 1),
    ]
    assert "a" not in watch.scorer._pending
    assert "b" in watch.scorer._pending


class _Parameters:
    custom_params = None
    frequency_penalty = presence_penalty = 0.0
    repetition_penalty = 1.0
    min_new_tokens = 0


class _Request:
    sampling_params = _Parameters()
    return_hidden_states = False
    return_sampling_mask = False
    custom_logit_processor = None


@pytest.mark.parametrize(
    ("change", "mode", "said"),
    [
        ({"return_hidden_states": True}, "tree", "return_hidden_states"),
        ({"return_hidden_states": True}, "shadow", "return_hidden_states"),
        ({"return_sampling_mask": True}, "tree", "return_sampling_mask"),
        ({"custom_logit_processor": "x"}, "tree", "custom_logit_processor"),
        ({"custom_logit_processor": "x"}, "shadow", None),
        ({}, "tree", None),
    ],
)
def test_requests_that_cannot_be_served_right_are_refused(change, mode, said):
    request = type("Request", (_Request,), change)()
    message = refusal(request, parse_config(json.dumps({"mode": mode})))
    assert (message is None) if said is None else message.startswith(said)


def test_a_budget_of_its_own_is_refused():
    parameters = type("Parameters", (), {"custom_params": {"ddtree_budget": 7}})()
    request = type("Request", (_Request,), {"sampling_params": parameters})()
    assert "ddtree_budget" in refusal(request, parse_config("{}"))


class Clock:
    """Events of a device whose stages take a second and two, but for those of the first two steps."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def test_stage_times_leave_out_the_steps_that_compile(monkeypatch):
    monkeypatch.setattr(metrics, "Event", Clock)
    times = metrics.StageTimes(enabled=True, every=4)
    for step in range(12):
        times.mark("start")
        Clock.now += 300.0 if step < 2 else 1.0
        times.mark("draft")
        Clock.now += 2.0
        times.mark("verify")
        times.end_step()
    assert times.read() == {"sampled_steps": 3, "stage_seconds": {"draft": 1.0, "verify": 2.0}}
