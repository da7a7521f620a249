"""shadow calibrated against ddtree, and what unsafe breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.compare.ablation import leaks, shadow_biases
from ddtree_ops.compare.analysis import analyse
from tests.support.make_store import make_store


def test_an_estimate_that_flatters_has_a_bias_above_one(clean_store: Path) -> None:
    """The maker adds a draft to every ninth logged step: the estimate is about 3 % too high."""
    biases = shadow_biases(analyse(clean_store).measures)
    assert [bias.shadow.cell.budget for bias in biases] == [7, 15, 31, 63]
    for bias in biases:
        assert 1.01 < bias.ratio.value < 1.08
        assert bias.ratio.low is not None
        assert bias.ratio.low > 1


def test_an_estimate_is_not_calibrated_against_another_budget(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("shadow", "ddtree"), invalid={("ddtree", 15): "throttled"})
    budgets = [bias.shadow.cell.budget for bias in shadow_biases(analyse(path).measures)]
    assert budgets == [7, 31, 63]


def test_leaks_are_counted_by_prompt_and_placed(clean_store: Path) -> None:
    (leak,) = leaks(analyse(clean_store).measures)
    assert (leak.wrong, leak.prompts) == (20, 20)
    assert leak.first_difference is not None
    assert 1 <= leak.first_difference < 40
    assert leak.accept_length is not None
    assert leak.accept_length.value < 1
    assert leak.pass_time is not None
    assert leak.pass_time.value == pytest.approx(1.0, abs=0.1)


def test_leaks_without_ddtree_or_ar_say_less_and_do_not_fail(tmp_path: Path) -> None:
    (leak,) = leaks(analyse(make_store(tmp_path / "s", arms=("unsafe",))).measures)
    assert leak.tree is None
    assert leak.accept_length is None
    assert leak.prompts == 0
