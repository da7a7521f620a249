"""Is a greedy output the reference's, and where it is not: a near-tie or a different answer?

A difference is judged at its first token only; what follows has another prefix. The target itself is asked
how close the two tokens are there: in float32 a gap up to 1e-4 is a near-tie, in bfloat16 up to twice the
largest change of a log-probability between two valid executions of that very prefix (one prefill of it all,
and decoding up to it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from ddtree_ops.bench.client import post_json
from ddtree_ops.bench.dataset import Prompt
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import Parity, ParityClass, ParityFinding, RequestRow, RequestStatus

FP32_TIE = 1e-4
NOISE_FACTOR = 2.0
NOISE_PLACES = 4
TOP_LOGPROBS = 4
SEVERITY = (ParityClass.IDENTICAL, ParityClass.NEAR_TIE, ParityClass.UNKNOWN, ParityClass.DIFFERENT)


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs differ; a token is null where that output had ended."""

    prompt_id: str
    index: int
    prefix: tuple[int, ...]
    token: int | None
    reference_token: int | None


@dataclass(frozen=True)
class Gap:
    """How far the worse of two tokens lies below the best one, and up to where that is a tie. Null: cannot be
    known.
    """

    gap: float | None
    threshold: float | None

    @property
    def parity(self) -> ParityClass:
        if self.gap is None or self.threshold is None:
            return ParityClass.UNKNOWN
        return ParityClass.NEAR_TIE if self.gap <= self.threshold else ParityClass.DIFFERENT


def first_difference(prompt_id: str, output: Sequence[int], reference: Sequence[int]) -> Difference | None:
    """Where two outputs part, or null when they are equal."""
    for index, (token, other) in enumerate(zip(output, reference, strict=False)):
        if token != other:
            return Difference(prompt_id, index, tuple(reference[:index]), token, other)
    index = min(len(output), len(reference))
    if len(output) == len(reference):
        return None
    return Difference(
        prompt_id,
        index,
        tuple(reference[:index]),
        output[index] if index < len(output) else None,
        reference[index] if index < len(reference) else None,
    )


class TargetProbe:
    """Asks a server for the target's log-probabilities after a prefix. Answers are remembered."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        prompts: Mapping[str, Prompt],
        *,
        dtype: str,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._url = url
        self._prompts = prompts
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._prompt_ids: dict[str, list[int]] = {}
        self._after: dict[tuple[str, tuple[int, ...]], dict[int, float]] = {}

    async def gap(self, difference: Difference) -> Gap:
        """The gap between the two tokens of a difference, by the target itself."""
        if difference.token is None or difference.reference_token is None:
            return Gap(None, None)  # one output ended: no two tokens to compare
        try:
            chances = await self._prefill(difference.prompt_id, difference.prefix)
            threshold = FP32_TIE
            if self._dtype != "float32":
                threshold = NOISE_FACTOR * await self.noise(difference.prompt_id, difference.prefix)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            return Gap(None, None)
        best = max(chances.values())
        tokens = (difference.token, difference.reference_token)
        worst = min(chances.get(token, -float("inf")) for token in tokens)
        if worst == -float("inf"):  # not even among the best few: the smallest gap that it could have
            worst = min(chances.values())
            return Gap(max(best - worst, 2 * threshold), threshold)
        return Gap(best - worst, threshold)

    async def _prefill(self, prompt_id: str, prefix: tuple[int, ...]) -> dict[int, float]:
        """Log-probabilities of the best next tokens after prompt + prefix, all of it in one prefill."""
        known = self._after.get((prompt_id, prefix))
        if known is None:
            ids = await self._ids(prompt_id)
            answer = await self._ask({"input_ids": [*ids, *prefix]}, 1)
            known = _top(answer, 0)
            self._after[prompt_id, prefix] = known
        return known

    async def noise(self, prompt_id: str, prefix: tuple[int, ...]) -> float:
        """The largest change of a log-probability when a prefix is decoded token by token instead.

        Measured at the prefix and at the places just before it. Greedy decoding may leave the prefix; then
        the last places that both executions share count. After the bare prompt there is one execution only,
        so at least one token is decoded.
        """
        answer = await self._ask({"input_ids": await self._ids(prompt_id)}, max(len(prefix), 1) + 1)
        decoded: list[int] = answer["output_ids"]
        shared = 0
        while shared < min(len(prefix), len(decoded) - 1) and decoded[shared] == prefix[shared]:
            shared += 1
        last = max(shared, 1)
        return max(
            [
                await self._change(prompt_id, tuple(decoded[:place]), _top(answer, place))
                for place in range(max(last - NOISE_PLACES + 1, 1), last + 1)
            ]
        )

    async def _change(self, prompt_id: str, prefix: tuple[int, ...], decoded: Mapping[int, float]) -> float:
        prefilled = await self._prefill(prompt_id, prefix)
        return max(
            (abs(prefilled[token] - decoded[token]) for token in prefilled if token in decoded), default=0.0
        )

    async def _ids(self, prompt_id: str) -> list[int]:
        """The prompt's token ids; the server says how it tokenised a text."""
        prompt = self._prompts[prompt_id]
        if prompt.input_ids is not None:
            return list(prompt.input_ids)
        if prompt_id not in self._prompt_ids:
            answer = await self._ask(prompt.request(), 1, logprob_start_len=0)
            entries = answer["meta_info"]["input_token_logprobs"]
            self._prompt_ids[prompt_id] = [int(entry[1]) for entry in entries]
        return self._prompt_ids[prompt_id]

    async def _ask(self, prompt: Mapping[str, Any], tokens: int, **more: Any) -> dict[str, Any]:
        request = {
            **prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
            **more,
        }
        return await post_json(self._session, self._url, "/generate", request, timeout_s=self._timeout_s)


async def compare(
    rows: Sequence[RequestRow],
    reference_rows: Sequence[RequestRow],
    reference: Arm,
    probe: TargetProbe | None,
) -> Parity:
    """Judge every prompt that both cells answered; over repeats the worst finding counts.

    probe  null: gaps cannot be known
    """
    theirs = {(row.prompt_id, row.repeat): row for row in reference_rows if row.status is RequestStatus.OK}
    found: dict[str, list[ParityFinding]] = defaultdict(list)
    for row in rows:
        other = theirs.get((row.prompt_id, row.repeat))
        if row.status is not RequestStatus.OK or other is None:
            found[row.prompt_id].append(ParityFinding(prompt_id=row.prompt_id, parity=ParityClass.UNKNOWN))
            continue
        difference = first_difference(row.prompt_id, row.output_ids, other.output_ids)
        found[row.prompt_id].append(await _judge(row.prompt_id, difference, probe))
    worst = [max(findings, key=lambda finding: SEVERITY.index(finding.parity)) for findings in found.values()]
    count = {kind: sum(finding.parity is kind for finding in worst) for kind in ParityClass}
    return Parity(
        reference=reference,
        identical=count[ParityClass.IDENTICAL],
        near_tie=count[ParityClass.NEAR_TIE],
        different=count[ParityClass.DIFFERENT],
        unknown=count[ParityClass.UNKNOWN],
        findings=[finding for finding in worst if finding.parity is not ParityClass.IDENTICAL],
    )


async def _judge(prompt_id: str, difference: Difference | None, probe: TargetProbe | None) -> ParityFinding:
    if difference is None:
        return ParityFinding(prompt_id=prompt_id, parity=ParityClass.IDENTICAL)
    gap = await probe.gap(difference) if probe else Gap(None, None)
    parity = gap.parity
    if difference.token is None or difference.reference_token is None:
        parity = ParityClass.DIFFERENT  # one of them stopped early
    return ParityFinding(
        prompt_id=prompt_id,
        parity=parity,
        first_difference=difference.index,
        token=difference.token,
        reference_token=difference.reference_token,
        gap=gap.gap,
        threshold=gap.threshold,
    )


def _top(answer: Mapping[str, Any], index: int) -> dict[int, float]:
    """token -> log-probability of the best few at one output position."""
    return {int(entry[1]): float(entry[0]) for entry in answer["meta_info"]["output_top_logprobs"][index]}
