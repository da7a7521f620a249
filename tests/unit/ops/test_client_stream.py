from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ddtree_ops.bench.client import AnswerStream, BadStream


def event(ids: Sequence[int], total: int, **meta: Any) -> bytes:
    return (
        b"data: "
        + json.dumps(
            {"text": "", "output_ids": list(ids), "meta_info": {"completion_tokens": total, **meta}}
        ).encode()
        + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
FINISH = {"finish_reason": {"type": "length", "length": 4}}


def feed(*chunks: bytes) -> AnswerStream:
    stream = AnswerStream()
    for number, chunk in enumerate(chunks):
        stream.feed(chunk, float(number))
    return stream


@pytest.mark.parametrize("second", [[1, 2, 3, 4], [2, 3, 4]], ids=["all so far", "new only"])
def test_both_ways_of_sending_ids_give_the_same_output(second: list[int]) -> None:
    stream = feed(event([1], 1), event(second, 4, **FINISH), DONE)
    assert stream.output_ids == [1, 2, 3, 4]
    assert stream.chunk_tokens == [1, 3]
    assert stream.chunk_s == [0.0, 1.0]
    assert stream.problem() is None


def test_new_ids_that_repeat_the_old_are_not_taken_for_all_so_far() -> None:
    stream = feed(event([7, 7], 2), event([7, 7], 4, **FINISH), DONE)
    assert stream.output_ids == [7, 7, 7, 7]


def test_events_that_arrive_in_one_read_are_one_chunk() -> None:
    stream = feed(event([1], 1) + event([1, 2], 2), event([1, 2, 3, 4], 4, **FINISH) + DONE)
    assert stream.chunk_tokens == [2, 2]


def test_an_event_cut_by_the_network_is_put_together() -> None:
    whole = event([1, 2, 3, 4], 4, **FINISH) + DONE
    stream = feed(whole[:25], whole[25:60], whole[60:])
    assert stream.output_ids == [1, 2, 3, 4]
    assert stream.chunk_s == [2.0]
    assert stream.problem() is None


def test_an_event_without_new_tokens_is_no_chunk() -> None:
    stream = feed(event([1, 2], 2), event([1, 2], 2, **FINISH), DONE)
    assert stream.chunk_tokens == [2]


@pytest.mark.parametrize(
    "chunks",
    [
        [event([1], 1)],
        [event([1], 1), DONE],
        [event([1], 1, **FINISH)],
        [event([1], 1, finish_reason={"type": "abort", "message": "gone"}), DONE],
        [],
    ],
    ids=["no end", "no finish reason", "no DONE", "aborted", "nothing"],
)
def test_a_stream_without_a_proper_end_is_a_problem(chunks: list[bytes]) -> None:
    assert feed(*chunks).problem()


@pytest.mark.parametrize(
    "chunk",
    [
        b"data: {oops\n\n",
        b"data: [1]\n\n",
        b'data: {"error": {"message": "out of memory"}}\n\n',
        b'data: {"output_ids": [1], "meta_info": {}}\n\n',
        event([1, 2, 3], 2),
        event([1, 2], 2) + event([9, 2, 3], 3),
    ],
    ids=["no JSON", "no object", "error", "no count", "wrong count", "other history"],
)
def test_what_is_not_the_protocol_is_refused(chunk: bytes) -> None:
    with pytest.raises(BadStream):
        feed(chunk)


def test_comments_and_carriage_returns_are_understood() -> None:
    stream = feed(b": ping\r\n\r\n" + event([1], 1, **FINISH).replace(b"\n", b"\r\n") + DONE)
    assert stream.output_ids == [1]
    assert stream.problem() is None
