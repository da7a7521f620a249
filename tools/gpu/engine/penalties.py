"""Whether every token of a penalised greedy answer is the one that its penalties choose.

Plain decoding is no reference here: under SGLang's overlap scheduler it does not count the newest token. So
the answer is given back as a prompt, whose plain log-probabilities the same server tells, and the penalties
are applied to those. Differences of log-probabilities are differences of logits, which is enough for what is
added. A repetition penalty scales logits themselves: what lies between the two, one number a place, follows
from the answer's own log-probabilities of tokens that it has penalised.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine.servers import Server
from engine.ties import DIGITS

BEST = 20
TOKENS = 40
CASES: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "all penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 16},
}
EQUAL, NEAR, WRONG, OPEN = "equal", "near-tie", "wrong", "open"


def ask(server: Server, case: str, prompt: list[int], stop: int, ends: Sequence[int]) -> dict[str, Any]:
    """One answer of a case, and what the server says about the same text without penalties.

    stop  a token that ends the answers of `min_new_tokens`, once they are long enough;  ends  the model's own
    """
    sampling = dict(CASES[case])
    if "min_new_tokens" in sampling:
        sampling |= {"stop_token_ids": [stop], "ignore_eos": False}
    asked = {"return_logprob": True, "top_logprobs_num": BEST}
    answer = server.generate(prompt, TOKENS, sampling=sampling, **asked)
    output = answer["output_ids"]
    forced = server.generate(prompt + output, 1, logprob_start_len=len(prompt) - 1, **asked)["meta_info"]
    return {
        "case": case,
        "sampling": sampling,
        "held_back": [stop, *ends],
        "output_ids": output,
        "answered": answer["meta_info"]["output_top_logprobs"],
        # Of the last places: what comes before is the prompt.
        "plain": forced["input_top_logprobs"][-len(output) :],
        "plain_tokens": forced["input_token_logprobs"][-len(output) :],
    }


def end_tokens(target: Path) -> list[int]:
    """Of a target's folder, the tokens that end an answer."""
    config = json.loads((target / "config.json").read_text())
    found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]


def summary(rows: list[dict[str, Any]], noise: float) -> dict[str, Any]:
    """Tokens of all answers by verdict, and how far the worst of them lies below the best token."""
    found: Counter[str] = Counter()
    gaps = [0.0]
    for row in rows:
        found += verdicts(row, noise)
        gaps += [place["gap"] for place in places(row) if place["gap"] is not None]
    return {name: found[name] for name in (EQUAL, NEAR, WRONG, OPEN)} | {"largest_gap": max(gaps)}


def verdicts(row: dict[str, Any], noise: float) -> Counter[str]:
    """How many tokens of an answer are equal, near-ties (within twice the noise), wrong, or open."""
    return Counter(verdict(place, noise) for place in places(row))


def verdict(place: dict[str, Any], noise: float) -> str:
    """Open is a place where what was listed does not tell: a token out of the list may be better."""
    if place["gap"] is None:
        return OPEN
    if place["gap"] > 2 * noise:
        return WRONG
    if place["unlisted"]:
        return OPEN
    return NEAR if place["gap"] > 0 else EQUAL


def places(row: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """For every token of an answer, how far it lies below the best one after penalties.

    gap       of penalised logits; None where the list does not tell logits from log-probabilities
    unlisted  whether a token that is not in the list may be better than the chosen one
    """
    sampling, output = row["sampling"], row["output_ids"]
    for at, token in enumerate(output):
        before = Counter(output[:at])
        plain = {one: logprob for logprob, one, *_ in row["plain"][at]}
        floor = min(plain.values())
        own, told, *_ = row["plain_tokens"][at]
        if told != token:
            raise ValueError(f"place {at}: asked about token {token}, told about {told}")
        plain.setdefault(token, own)
        offset = offset_of(plain, {one: value for value, one, *_ in row["answered"][at]}, before, sampling)
        if offset is None:
            yield {"place": at, "gap": None, "unlisted": True}
            continue
        held = row["held_back"] if at < sampling.get("min_new_tokens", 0) else []
        values = {
            one: penalised(logprob + offset, before[one], sampling)
            for one, logprob in plain.items()
            if one not in held
        }
        if token not in values:
            yield {"place": at, "gap": float("inf"), "unlisted": False}
            continue
        gap = round(max(values.values()) - values[token], DIGITS)
        yield {"place": at, "gap": gap, "unlisted": floor + offset > values[token]}


def penalised(logit: float, times: int, sampling: dict[str, Any]) -> float:
    """A logit under the penalties of a token that is in the output so many times."""
    if not times:
        return logit
    logit -= sampling.get("frequency_penalty", 0.0) * times + sampling.get("presence_penalty", 0.0)
    scale = sampling.get("repetition_penalty", 1.0)
    return float(logit * scale if logit < 0 else logit / scale)


def offset_of(
    plain: dict[int, float], answered: dict[int, float], before: Counter[int], sampling: dict[str, Any]
) -> float | None:
    """What has to be added to a place's log-probabilities for their logits; None where it cannot be known.

    Of a token that is not in the output yet, both distributions have the same logit: that aligns them. A
    penalised one has l in the first and (l - a) / r in the second, or (l - a) * r, and each is solved for l:
    of what is found so, the offset that explains all tokens best, the larger of equals. Anything does where
    nothing is scaled.
    """
    scale = sampling.get("repetition_penalty", 1.0)
    if scale == 1.0 or not any(before[token] for token in plain):
        return 0.0
    both = plain.keys() & answered.keys()
    fresh = [answered[token] - plain[token] for token in both if not before[token]]
    if not fresh:
        return None
    shift = statistics.median(fresh)
    told = {token: answered[token] - shift for token in both if before[token]}
    found = []
    for token, seen in told.items():
        only_added = penalised(plain[token], before[token], sampling | {"repetition_penalty": 1.0})
        found += [(factor * only_added - seen) / (1 - factor) for factor in (1 / scale, scale)]

    def unexplained(offset: float) -> float:
        return sum(
            abs(penalised(plain[token] + offset, before[token], sampling) - (seen + offset))
            for token, seen in told.items()
        )

    return min(found, key=lambda offset: (round(unexplained(offset), DIGITS), -offset)) if found else None
