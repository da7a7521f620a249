"""What a parity shows: equal, different, or neither; and the words for what is missing."""

from __future__ import annotations

import pytest

from ddtree_ops.bench.quickstart import _parity as parity_column
from ddtree_ops.compare.parity import shortfall, shown
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import Parity, ParityClass, ParityFinding


def parity(**counts: int) -> Parity:
    return Parity(reference=Arm.AR, **({"identical": 0, "near_tie": 0, "different": 0} | counts))


def with_unknown(first_difference: int | None) -> Parity:
    """One prompt equal, one judged and unknown: it parts somewhere, or one of its answers failed."""
    finding = ParityFinding(
        prompt_id="p", parity=ParityClass.UNKNOWN, first_difference=first_difference, token=1
    )
    return parity(identical=1, unknown=1).model_copy(update={"findings": [finding]})


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ({"identical": 3, "near_tie": 2}, True),
        ({"identical": 4, "different": 1}, False),
        ({"identical": 4, "unknown": 1}, None),
        ({"different": 1, "unknown": 4}, False),
        ({}, None),
    ],
)
def test_unknown_is_neither_equal_nor_different(counts: dict[str, int], answer: bool | None) -> None:
    assert shown(parity(**counts)) is answer


def test_what_is_shown_falls_short_of_nothing() -> None:
    assert shortfall(parity(identical=3, near_tie=2)) is None


def test_the_words_tell_different_from_not_asked() -> None:
    assert shortfall(parity(identical=4, different=1)) == "output differs from ar on 1 of 5 prompts"
    assert shortfall(parity(identical=4, unknown=25)) == (
        "not compared with ar on 25 of 29 prompts (ar was not asked)"
    )
    assert shortfall(parity()) == "not compared with ar on 0 of 0 prompts (ar was not asked)"


def test_outputs_that_part_where_the_target_could_not_be_asked_are_said_to_part() -> None:
    assert shortfall(with_unknown(7)) == (
        "parts from ar on 1 of 2 prompts, and how near a tie could not be told"
    )


def test_an_answer_that_failed_is_not_called_unasked() -> None:
    assert shortfall(with_unknown(None)) == (
        "not compared with ar on 1 of 2 prompts (an answer failed or is missing)"
    )


def test_the_console_counts_unknown_prompts_among_all() -> None:
    counts = parity(identical=2, near_tie=2, unknown=25).model_dump()
    assert parity_column(counts) == "2 + 2 near-ties of 29, 25 unknown"
