"""Where two answers to a prompt part, and what servers say of the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.servers import Server

# Candidates asked for, prompts that noise is measured on, and the token of each.
BEST = 16
NOISE_PROMPTS, NOISE_PLACE = 16, 24


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def parting(one: list[int], other: list[int]) -> int | None:
    """The place of the first difference; None where one is the other's start."""
    place = common_prefix(one, other)
    return None if place == min(len(one), len(other)) else place


def best_tokens(server: Server, ids: list[int], count: int = BEST) -> Any:
    """The best next tokens of a prefill, as [log-probability, token, text]."""
    answer = server.generate(ids, 1, return_logprob=True, top_logprobs_num=count)
    return answer["meta_info"]["output_top_logprobs"][0]


def noise_rows(
    prompts: Sequence[list[int]], plain: Server, trees: Server, in_time: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """One prefix in right executions (see `ties.noise`): a plain decode, and a prefill at either server."""
    for prompt in prompts[:NOISE_PROMPTS]:
        if not in_time():
            return
        decoded = plain.generate(prompt, NOISE_PLACE + 1, return_logprob=True, top_logprobs_num=BEST)
        prefix = prompt + decoded["output_ids"][:NOISE_PLACE]
        yield {
            "decode": decoded["meta_info"]["output_top_logprobs"][NOISE_PLACE],
            "prefill": best_tokens(plain, prefix),
            "together": best_tokens(trees, prefix),
        }
