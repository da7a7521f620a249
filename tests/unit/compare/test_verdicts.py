"""Verdicts: given only where they are earned, with the reason where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.compare.analysis import Analysis, analyse
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.verdicts import Answer, Metric, Verdict, answer_for, judge
from ddtree_ops.schemas.arms import Arm
from tests.support.make_store import make_store


@pytest.fixture(scope="module")
def mixed(store: Path) -> Analysis:
    return analyse(store)


@pytest.fixture(scope="module")
def clean(clean_store: Path) -> Analysis:
    return analyse(clean_store)


def find(analysis: Analysis, label: str, baseline: str, metric: Metric) -> Verdict:
    found = [
        verdict
        for verdict in analysis.verdicts
        if verdict.cell.label == label and verdict.baseline.value == baseline and verdict.metric is metric
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("interval", "answer"),
    [
        (Interval(1.2, 1.1, 1.3, 10), Answer.FASTER),
        (Interval(0.8, 0.7, 0.9, 10), Answer.SLOWER),
        (Interval(1.1, 1.0, 1.3, 10), Answer.CANT_TELL),
        (Interval(0.9, 0.8, 1.0, 10), Answer.CANT_TELL),
        (Interval(1.0, 1.0, 1.0, 10), Answer.CANT_TELL),
        (Interval(3.0, None, None, 4), Answer.CANT_TELL),
    ],
)
def test_an_interval_that_touches_one_tells_nothing(interval: Interval, answer: Answer) -> None:
    assert answer_for(interval)[0] is answer


def test_a_tree_that_accepts_more_wins_per_pass(clean: Analysis) -> None:
    verdict = find(clean, "ddtree 63", "dflash", Metric.ACCEPT_LENGTH)
    assert verdict.answer is Answer.FASTER
    assert verdict.ratio is not None
    assert verdict.ratio.n == 20


def test_a_tree_that_accepts_more_may_still_lose_per_second(tmp_path: Path) -> None:
    slow = analyse(make_store(tmp_path / "slow", arms=("ar", "dflash", "ddtree"), node_ms=2.0))
    assert find(slow, "ddtree 63", "dflash", Metric.ACCEPT_LENGTH).answer is Answer.FASTER
    assert find(slow, "ddtree 63", "dflash", Metric.TOKENS_PER_SECOND).answer is Answer.SLOWER


def test_a_tree_that_gains_nothing_is_not_called_better(tmp_path: Path) -> None:
    """Gain 0 gives trees the chain's own hit rate: any verdict per pass would be noise."""
    none = analyse(make_store(tmp_path / "none", arms=("ar", "dflash", "ddtree"), gain=0.0, prompts=16))
    answers = [
        verdict.answer
        for verdict in none.verdicts
        if verdict.metric is Metric.ACCEPT_LENGTH and verdict.baseline is Arm.DFLASH
    ]
    assert answers.count(Answer.CANT_TELL) >= 3


def test_shadow_decodes_as_dflash_does_so_its_accept_length_can_not_differ(clean: Analysis) -> None:
    verdict = find(clean, "shadow 31", "dflash", Metric.ACCEPT_LENGTH)
    assert verdict.answer is Answer.CANT_TELL
    assert verdict.reason == "equal on every prompt"
    assert verdict.ratio == Interval(1.0, 1.0, 1.0, 20)


def test_unsafe_is_in_no_verdict(mixed: Analysis) -> None:
    assert Arm.UNSAFE in {item.cell.arm for item in mixed.measures}
    assert all(verdict.cell.arm is not Arm.UNSAFE for verdict in mixed.verdicts)
    assert all("unsafe" not in name for best in mixed.best for name in best.candidates)


def test_a_cell_with_failed_requests_gets_no_verdict_but_the_reason(mixed: Analysis) -> None:
    verdict = find(mixed, "shadow 15", "ar", Metric.TOKENS_PER_SECOND)
    assert verdict.answer is Answer.NO_VERDICT
    assert verdict.ratio is None
    assert "connection reset by the server" in verdict.reason


def test_an_invalid_cell_gets_no_verdict_and_is_no_candidate_for_the_best(mixed: Analysis) -> None:
    verdict = find(mixed, "ddtree 7", "dflash", Metric.ACCEPT_LENGTH)
    assert verdict.answer is Answer.NO_VERDICT
    assert "prefix cache" in verdict.reason
    assert all("ddtree 7" not in best.candidates for best in mixed.best)


def test_failed_requests_in_a_cell_that_calls_itself_complete_still_bar_a_verdict(tmp_path: Path) -> None:
    """A mean over survivors is no mean: the rows are counted, whatever the state says."""
    path = make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), failed={("dflash", None): "timeout"})
    for file in path.glob("cells/*/cell.json"):
        file.write_text(file.read_text().replace('"state": "failed"', '"state": "complete"'))
    verdict = find(analyse(path), "ddtree 31", "dflash", Metric.ACCEPT_LENGTH)
    assert verdict.answer is Answer.NO_VERDICT
    assert "3 of 10 requests failed" in verdict.reason


def test_wrong_output_bars_a_verdict_however_fast_it_came(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), different={("ddtree", 31): 2})
    verdict = find(analyse(path), "ddtree 31", "dflash", Metric.TOKENS_PER_SECOND)
    assert verdict.answer is Answer.NO_VERDICT
    assert verdict.reason == "ddtree 31: output differs from ar on 2 of 10 prompts"


def test_prompts_that_ar_was_not_asked_bar_a_verdict_and_are_not_called_different(tmp_path: Path) -> None:
    arms = ("dflash", "ddtree")
    unasked = {("dflash", None): 6, ("ddtree", 31): 6}
    analysis = analyse(make_store(tmp_path / "s", arms=("ar", *arms), unasked=unasked, budgets=(31,)))
    verdict = find(analysis, "ddtree 31", "dflash", Metric.TOKENS_PER_SECOND)
    assert verdict.answer is Answer.NO_VERDICT
    assert verdict.ratio is None
    assert verdict.reason == "ddtree 31: not compared with ar on 6 of 10 prompts (ar was not asked)"
    assert analysis.best == ()


def test_near_ties_do_not_bar_a_verdict(mixed: Analysis) -> None:
    assert find(mixed, "ddtree 63", "dflash", Metric.ACCEPT_LENGTH).answer is not Answer.NO_VERDICT


def test_four_prompts_are_too_few_to_tell(tmp_path: Path) -> None:
    few = analyse(make_store(tmp_path / "few", arms=("ar", "dflash", "ddtree"), prompts=4))
    verdict = find(few, "ddtree 63", "ar", Metric.ACCEPT_LENGTH)
    assert verdict.answer is Answer.CANT_TELL
    assert verdict.reason == "only 4 prompts of the 5 that an interval needs"


def test_repeats_that_disagree_take_the_verdict_back(tmp_path: Path) -> None:
    """Repeat 2 of the tree is made 40 % slower, repeat 1 stays 30 % faster: no single direction holds."""
    analysis = analyse(make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), repeats=2, noise=0.01))
    chain = next(item for item in analysis.measures if item.cell.arm is Arm.DFLASH)
    tree = next(item for item in analysis.measures if item.cell.label == "ddtree 7")
    assert judge(tree, chain, Metric.TOKENS_PER_SECOND).answer is Answer.FASTER
    tree.frame.loc[tree.frame["repeat"] == 0, "e2e_s"] *= 0.6
    tree.frame.loc[tree.frame["repeat"] == 1, "e2e_s"] *= 1.45
    verdict = judge(tree, chain, Metric.TOKENS_PER_SECOND)
    assert verdict.answer is Answer.CANT_TELL
    assert "repeats disagree" in verdict.reason


def test_arms_that_did_different_work_are_not_compared(tmp_path: Path) -> None:
    here = analyse(make_store(tmp_path / "a", arms=("ar", "dflash", "ddtree")))
    there = analyse(make_store(tmp_path / "b", arms=("ar", "dflash", "ddtree"), host="host-b"))
    tree = next(item for item in here.measures if item.cell.arm is Arm.DDTREE)
    chain = next(item for item in there.measures if item.cell.arm is Arm.DFLASH)
    verdict = judge(tree, chain, Metric.TOKENS_PER_SECOND)
    assert verdict.answer is Answer.NO_VERDICT
    assert "host_fingerprint differs" in verdict.reason


def test_loads_are_not_mixed(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree"), concurrencies=(1, 8), budgets=(31,))
    analysis = analyse(path)
    assert len(analysis.verdicts) == 2 * 2 * 2
    ratios = {
        v.cell.spec.concurrency: v.ratio for v in analysis.verdicts if v.metric is Metric.TOKENS_PER_SECOND
    }
    assert set(ratios) == {1, 8}


def test_the_best_of_equal_trees_is_not_praised_for_its_luck(tmp_path: Path) -> None:
    """Four trees without any gain: the best looks better than 1, on the other half it does not."""
    naive, fair = [], []
    for seed in range(12):
        path = make_store(tmp_path / str(seed), arms=("dflash", "ddtree"), gain=0.0, prompts=12, seed=seed)
        analysis = analyse(path)
        ratios = [
            verdict.ratio.value
            for verdict in analysis.verdicts
            if verdict.metric is Metric.ACCEPT_LENGTH and verdict.ratio is not None
        ]
        naive.append(max(ratios))
        fair += [best.ratio.value for best in analysis.best if best.metric is Metric.ACCEPT_LENGTH]
    assert sum(naive) / len(naive) > 1.02
    assert sum(fair) / len(fair) < sum(naive) / len(naive) - 0.02


def test_when_both_halves_pick_one_tree_its_ratio_is_the_plain_one(tmp_path: Path) -> None:
    analysis = analyse(make_store(tmp_path / "s", arms=("dflash", "ddtree"), budgets=(7, 63), gain=2.5))
    best = next(item for item in analysis.best if item.metric is Metric.ACCEPT_LENGTH)
    assert best.picks == ("ddtree 63", "ddtree 63")
    plain = find(analysis, "ddtree 63", "dflash", Metric.ACCEPT_LENGTH).ratio
    assert plain is not None
    assert best.ratio.value == pytest.approx(plain.value)
