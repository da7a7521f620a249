"""Intervals with known answers: coverage on synthetic prompts, identical arms, too few prompts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ddtree_ops.compare.statistics import (
    Bootstrap,
    Direction,
    Interval,
    direction,
    expanded_tail,
    split_halves,
    student_quantile,
)


def synthetic_prompts(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and steps of prompts of skewed difficulty; the true ratio of sums is 96 / E[steps]."""
    steps = np.round(20 + 30 * rng.gamma(4.0, 0.25, prompts))
    return np.full(prompts, 96.0), steps


@pytest.mark.parametrize(("prompts", "floor"), [(8, 0.91), (10, 0.92), (40, 0.93)])
def test_the_interval_of_a_rate_covers_the_truth_about_as_often_as_it_says(
    prompts: int, floor: float
) -> None:
    rng = np.random.default_rng(1)
    truth = 96 / synthetic_prompts(rng, 2_000_000)[1].mean()
    trials = 600
    hits = 0
    for trial in range(trials):
        tokens, steps = synthetic_prompts(rng, prompts)
        interval = Bootstrap(prompts, seed=trial, resamples=800).ratio_of_sums(tokens, steps)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= truth <= interval.high
    assert floor <= hits / trials <= 0.985


def test_the_interval_of_a_paired_ratio_covers_the_truth() -> None:
    rng = np.random.default_rng(2)
    trials, prompts, hits = 500, 12, 0
    for trial in range(trials):
        tokens, chain = synthetic_prompts(rng, prompts)
        tree = chain / 1.25 * rng.lognormal(0, 0.1, prompts) / np.exp(0.005)
        ratio = Bootstrap(prompts, seed=trial, resamples=800).ratio_of_rates((tokens, tree), (tokens, chain))
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        hits += ratio.low <= 1.25 <= ratio.high
    assert 0.915 <= hits / trials <= 0.985


def test_two_runs_of_one_service_are_seldom_told_apart() -> None:
    """A/A: the share of wrong verdicts stays near the 5 % that the confidence allows."""
    rng = np.random.default_rng(3)
    trials, prompts, wrong = 500, 10, 0
    for trial in range(trials):
        difficulty = rng.lognormal(0, 0.4, prompts)
        tokens = np.full(prompts, 96.0)
        first, second = (difficulty * rng.lognormal(0, 0.05, prompts) for _ in range(2))
        ratio = Bootstrap(prompts, seed=trial, resamples=800).ratio_of_rates(
            (tokens, first), (tokens, second)
        )
        wrong += direction(ratio) is not Direction.CANT_TELL
    assert wrong / trials <= 0.085


def test_pairing_cancels_what_makes_a_prompt_hard() -> None:
    """A gain of 10 % on prompts whose difficulty varies by 3 times is seen only because arms are paired."""
    rng = np.random.default_rng(4)
    difficulty = rng.uniform(10, 30, 12)
    tokens = np.full(12, 96.0)
    tree = difficulty / 1.1 * rng.lognormal(0, 0.02, 12)
    bootstrap = Bootstrap(12, seed=0)
    paired = bootstrap.ratio_of_rates((tokens, tree), (tokens, difficulty))
    shuffled = bootstrap.ratio_of_rates((tokens, tree), (tokens, rng.permutation(difficulty)))
    assert direction(paired) is Direction.FASTER
    assert direction(shuffled) is Direction.CANT_TELL


def test_identical_arms_give_exactly_one_and_no_direction() -> None:
    tokens, steps = [96.0] * 7, [31.0, 43.0, 47.0, 53.0, 29.0, 61.0, 37.0]
    ratio = Bootstrap(7).ratio_of_rates((tokens, steps), (tokens, steps))
    assert ratio == Interval(1.0, 1.0, 1.0, 7)
    assert direction(ratio) is Direction.CANT_TELL


@pytest.mark.parametrize("prompts", [0, 1, 4])
def test_too_few_prompts_give_a_value_without_an_interval(prompts: int) -> None:
    tokens, steps = [96.0] * prompts, [float(30 + i) for i in range(prompts)]
    interval = Bootstrap(prompts).ratio_of_sums(tokens, steps)
    if prompts == 0:
        assert interval is None
        return
    assert interval is not None
    assert not interval.known
    assert interval.value == pytest.approx(sum(tokens) / sum(steps))
    assert direction(interval) is Direction.CANT_TELL


def test_a_rate_without_any_step_is_none_and_not_infinite() -> None:
    assert Bootstrap(5).ratio_of_sums([1.0] * 5, [0.0] * 5) is None
    assert Bootstrap(5).ratio_of_rates(([1.0] * 5, [1.0] * 5), ([0.0] * 5, [1.0] * 5)) is None


def test_a_rate_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    interval = Bootstrap(5).ratio_of_sums([100.0, 1.0, 1.0, 1.0, 1.0], [10.0, 1.0, 1.0, 1.0, 1.0])
    assert interval is not None
    assert interval.value == pytest.approx(104 / 14)


def test_repeats_of_a_prompt_are_resampled_together() -> None:
    """Ten copies of each prompt's value are no more evidence than one."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    once = Bootstrap(7, seed=5).median([[value] for value in values])
    often = Bootstrap(7, seed=5).median([[value] * 10 for value in values])
    assert once == often


def test_the_median_of_unequal_clusters_ignores_missing_repeats() -> None:
    interval = Bootstrap(5).median([[1.0, 1.0], [2.0], [3.0], [4.0], [5.0, 5.0]])
    assert interval is not None
    assert interval.value == 3.0
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= 3.0 <= interval.high


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    tokens, steps = [96.0] * 8, [31.0, 43.0, 47.0, 53.0, 29.0, 61.0, 37.0, 41.0]
    first = Bootstrap(8, seed=1).ratio_of_sums(tokens, steps)
    assert first == Bootstrap(8, seed=1).ratio_of_sums(tokens, steps)
    assert first != Bootstrap(8, seed=2).ratio_of_sums(tokens, steps)


def test_values_of_another_length_than_the_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="5 prompts"):
        Bootstrap(5).ratio_of_sums([1.0] * 6, [1.0] * 6)
    with pytest.raises(ValueError, match="5"):
        Bootstrap(5).median([[1.0]] * 4)


@pytest.mark.parametrize("freedom", [4, 5, 9, 19, 99])
def test_student_quantiles_agree_with_scipy(freedom: int) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=5e-3)


def test_tails_are_taken_further_out_for_few_prompts() -> None:
    assert expanded_tail(5) < expanded_tail(10) < expanded_tail(100) < 0.025
    assert expanded_tail(10_000) == pytest.approx(0.025, rel=0.01)


def test_halves_are_disjoint_and_cover_every_prompt() -> None:
    first, second = split_halves(11, seed=3)
    assert len(first) == 5
    assert sorted([*first, *second]) == list(range(11))
