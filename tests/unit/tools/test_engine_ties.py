"""Near-ties of bfloat16, and why a step differs between two engines."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import compare_steps
from engine import ties, workloads


def best(*logits):
    """Best tokens 1, 2, ... of a distribution with these logits, as SGLang answers."""
    values = np.array(logits)
    logprobs = values - np.logaddexp.reduce(values)
    return [[float(value), token, None] for token, value in enumerate(logprobs, 1)]


def test_noise_is_a_distance_of_logits_and_not_of_log_probabilities():
    # The best token falls by a step of bfloat16 and the sum with it: no log-probability moves by a step.
    row = {"decode": best(8.0, 4.0), "prefill": best(7.875, 4.0)}
    moved = [abs(a[0] - b[0]) for a, b in zip(row["decode"], row["prefill"], strict=True)]
    assert max(moved) < 0.1249
    assert ties.noise([row]) == 0.125


def test_noise_is_the_largest_over_all_executions_of_a_prefix():
    same = best(8.0, 7.5)
    rows = [{"decode": same, "together": best(8.0, 7.625), "batched": [same, best(8.0, 7.375)]}]
    assert ties.noise(rows) == 0.25
    assert ties.noise([]) is None


def test_an_execution_without_one_of_the_two_tokens_says_nothing():
    other = [[-0.1, 1, None], [-3.0, 7, None]]
    assert ties.noise([{"decode": best(8.0, 7.5), "prefill": other}]) is None


def test_the_gap_is_that_of_the_tokens_that_were_chosen():
    three = best(8.0, 7.75, 7.0)
    assert ties.gap(three, [1, 2]) == 0.25
    assert ties.gap(three, [3, 2]) == 1.0
    assert ties.gap(three, [1, 9]) is None
    assert ties.is_near({"best": three, "tokens": [2, 1]}, 0.125)
    assert not ties.is_near({"best": three, "tokens": [2, 1]}, 0.1247)
    assert not ties.is_near({"best": three, "tokens": [9, 1]}, 10.0)


def answer(*tokens):
    meta = {"output_top_logprobs": [[[-0.1, token, None]] for token in tokens]}
    return {"output_ids": list(tokens), "meta_info": meta}


def test_a_batch_whose_text_has_parted_is_no_execution_of_the_prefix():
    rows = workloads.tie_rows(answer(5, 6, 7), answer(5, 8, 9))
    assert [row["decode"][0][1] for row in rows] == [5, 6, 7]
    assert ["together" in row for row in rows] == [True, True, False]


# A root, tokens 11 and 12 after it and 21 after 11; the log-probabilities say which of them a tree takes.
TABLE = {"ids": [[11, 12], [21, 22]], "logprobs": [[-0.1, -2.5], [-0.2, -2.0]]}
STEP = TABLE | {
    "tokens": [1, 11, 21],
    "scores": [0.0, -0.1, -0.3],
    "path": [0, 1, 2],
    "best_logprobs": [[-0.1, -3.0], [-0.7, -0.8], [-0.1, -4.0]],
}


def test_targets_that_chose_differently_are_told_with_their_gap():
    found = compare_steps.why(STEP, TABLE, [11, 21, 30], [11, 22], budget=2)
    assert (found["cause"], found["at"]) == ("target", 1)
    assert found["margin"] == pytest.approx(0.1)


def test_a_node_that_one_tree_lacks_is_told_with_its_distance_from_the_last_taken():
    # The GPU's tree holds 11 and 21, the CPU's (budget 1) only 11: its walk ends before 21.
    found = compare_steps.why(STEP, TABLE, [11, 21, 30], [11, 21], budget=1)
    assert (found["cause"], found["at"]) == ("tree", 2)
    assert found["margin"] == pytest.approx(-0.1 + 0.3)
    # The same the other way round: 12 is in the CPU's tree, and in the GPU's it would have come after 21.
    found = compare_steps.why(STEP, TABLE, [12], [12, 40], budget=3)
    assert found["margin"] == pytest.approx(-0.3 + 2.5)


def test_a_token_that_one_drafter_never_proposed_has_no_margin():
    found = compare_steps.why(STEP, TABLE, [99], [99, 40], budget=3)
    assert found == {"cause": "tree", "margin": None, "at": 1}


LOGGED = STEP | {"parents": [-1, 0, 1], "accepted": 3, "bonus": 30, "best_ids": [[11, 7], [8, 21], [30, 9]]}


def test_a_step_is_made_again_from_its_own_numbers():
    tied = LOGGED | {"best_logprobs": [[-0.1, -3.0], [-0.7, -0.7], [-0.1, -4.0]]}
    assert compare_steps.again(tied, 2, "best-first") == {"tree_equal": True, "walk_equal": True}
    # 8 is better than 21, which the walk took.
    assert compare_steps.again(LOGGED, 2, "best-first") == {"tree_equal": True, "walk_equal": False}
    other = LOGGED | {"tokens": [1, 11, 12], "parents": [-1, 0, 0]}
    assert compare_steps.again(other, 2, "best-first")["tree_equal"] is False
