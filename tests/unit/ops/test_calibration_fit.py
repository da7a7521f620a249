from __future__ import annotations

import numpy as np
import pytest

from ddtree_ops.bench.calibrate import fit, split_prompts
from ddtree_ops.bench.calibration_fit import (
    Examples,
    Step,
    Table,
    collect_examples,
    fit_table,
    log_loss,
    reliability,
    walk_truth,
)
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.errors import JobFailed

POSITIONS, TOPK = 5, 3


def step(ids: list[list[int]], truth: list[int]) -> Step:
    table = np.array(ids)
    return Step(table, np.log(np.full(table.shape, 0.25)), tuple(truth))


def test_the_truth_is_walked_while_it_stays_in_the_table() -> None:
    table = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert list(walk_truth(step(table, [1, 4, 5, 9, 1]))) == [
        (0, True, 0),
        (1, True, 1),
        (2, False, 0),
        (3, False, -1),
    ]
    assert list(walk_truth(step(table, [9, 3]))) == [(0, True, -1)]
    assert list(walk_truth(step(table, [1]))) == [(0, True, 0)]
    assert list(walk_truth(step(table, []))) == []


def test_every_depth_reached_gives_one_example_for_each_rank() -> None:
    on, off = collect_examples([step([[1, 2], [3, 4], [5, 6]], [2, 3, 9])])
    assert on.depth.tolist() == [0, 0]
    assert on.label.tolist() == [0.0, 1.0]
    assert off.depth.tolist() == [1, 1, 2, 2]
    assert off.rank.tolist() == [0, 1, 0, 1]
    assert off.label.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_padding_is_no_example() -> None:
    padded = Step(np.array([[1, 2]]), np.array([[-0.1, -np.inf]]), (1,))
    on, _ = collect_examples([padded])
    assert on.rank.tolist() == [0]


def draw(count: int, seed: int = 0) -> tuple[Examples, Table]:
    """Examples of a known model."""
    rng = np.random.default_rng(seed)
    truth = Table(np.array([0.5, 0.0, -0.5, -1.0, -1.5]), np.array([1.0, -1.0, -2.0]), 0.8)
    depth, rank = rng.integers(0, POSITIONS, count), rng.integers(0, TOPK, count)
    logprob = -rng.exponential(1.0, count)
    blank = Examples(depth, rank, logprob, np.zeros(count))
    label = (rng.random(count) < truth.chance(blank)).astype(float)
    return Examples(depth, rank, logprob, label), truth


def test_the_fit_recovers_a_known_model() -> None:
    examples, truth = draw(60_000)
    fitted = fit_table(examples, POSITIONS, TOPK)
    unseen, _ = draw(5_000, seed=1)
    assert np.abs(fitted.chance(unseen) - truth.chance(unseen)).max() < 0.03
    assert fitted.slope == pytest.approx(truth.slope, abs=0.05)


def test_the_fit_is_where_the_gradient_vanishes() -> None:
    examples, _ = draw(2_000)
    fitted = fit_table(examples, POSITIONS, TOPK)

    def objective(slope: float) -> float:
        moved = Table(fitted.depth, fitted.rank, slope)
        return log_loss(moved.chance(examples), examples.label)

    step_size = 1e-3
    derivative = (objective(fitted.slope + step_size) - objective(fitted.slope - step_size)) / (2 * step_size)
    assert abs(derivative) < 1e-4


def test_a_depth_never_reached_takes_after_its_neighbours() -> None:
    examples, _ = draw(20_000)
    seen = examples.depth != 3
    thinned = Examples(
        examples.depth[seen], examples.rank[seen], examples.logprob[seen], examples.label[seen]
    )
    fitted = fit_table(thinned, POSITIONS, TOPK)
    assert fitted.depth[3] == pytest.approx((fitted.depth[2] + fitted.depth[4]) / 2, abs=0.05)


def test_without_examples_a_log_probability_counts_as_it_is() -> None:
    empty = Examples(*(np.zeros(0, dtype=int),) * 2, np.zeros(0), np.zeros(0))
    fitted = fit_table(empty, POSITIONS, TOPK)
    assert fitted.slope == 1.0
    assert not fitted.depth.any()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_examples_of_one_outcome_only_stay_finite(label: float) -> None:
    examples, _ = draw(500)
    one = Examples(examples.depth, examples.rank, examples.logprob, np.full(500, label))
    fitted = fit_table(one, POSITIONS, TOPK)
    assert np.isfinite([*fitted.depth, *fitted.rank, fitted.slope]).all()


def test_reliability_counts_every_example_once() -> None:
    chance, label = np.array([0.0, 0.05, 0.95, 1.0]), np.array([0.0, 0.0, 1.0, 1.0])
    bins = reliability(chance, label)
    assert [entry["examples"] for entry in bins] == [2, 2]
    assert bins[1]["observed"] == 1.0


def random_steps(count: int, seed: int) -> list[Step]:
    """Steps whose truth is at rank 0 in 7 of 10 places, else at rank 1 or nowhere."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        ids = np.arange(1, 1 + 15 * 4).reshape(15, 4)
        ranks = rng.choice([0, 1, 4], 15, p=[0.7, 0.2, 0.1])
        truth = tuple(0 if rank == 4 else int(ids[depth, rank]) for depth, rank in enumerate(ranks))
        logprobs = np.log(np.tile([0.4, 0.3, 0.2, 0.1], (15, 1)))
        steps.append(Step(ids, logprobs, truth))
    return steps


def test_fit_and_judgement_use_different_prompts() -> None:
    prompts = [Prompt(name, text=name) for name in "abcdef"]
    fitted, judged = split_prompts(prompts)
    assert [prompt.id for prompt in fitted] == ["a", "b", "d", "e"]
    assert [prompt.id for prompt in judged] == ["c", "f"]


def test_a_fitted_file_is_what_the_engine_reads_and_helps_on_unseen_steps() -> None:
    from ddtree_engine.tree import parse_calibration

    content = fit(random_steps(200, 0), random_steps(200, 1), {"about": "test"})
    calibration = parse_calibration(content)
    assert (calibration.block, calibration.topk) == (16, 4)
    judged = content["fit"]["judged"]
    assert judged["on"]["log_loss"] < judged["on"]["log_loss_raw"]
    for entry in judged["accept_length"]:
        assert entry["calibrated"] >= entry["best-first"]
    assert judged["accept_length"][0]["calibrated"] > judged["accept_length"][0]["spine-first"] * 0.9


def test_no_steps_are_an_error() -> None:
    with pytest.raises(JobFailed, match="no steps"):
        fit([], [], {})
