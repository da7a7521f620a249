"""JSON answers, shaped like SGLang 0.5.23's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ddtree_engine.reference.engine import Arm, RunningRequest, TokenLogprobs
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.scheduler import Update
from ddtree_engine.reference.stats import score, tables
from ddtree_engine.reference.text import TextCodec


class Answers:
    """Turns updates into answers for one engine: `block` is F (None for `ar`)."""

    def __init__(self, arm: Arm, codec: TextCodec, model_name: str, topk: int, block: int | None) -> None:
        self.arm = arm
        self.codec = codec
        self.model_name = model_name
        self.topk = topk
        self.block = block

    def generate(self, request: GenerateRequest, update: Update, seconds: float) -> dict[str, Any]:
        """A `/generate` answer or one event of its stream (cumulative, as SGLang's default)."""
        return {
            "text": update.text,
            "output_ids": list(update.output_ids),
            "meta_info": self.meta(request, update, seconds),
        }

    def meta(self, request: GenerateRequest, update: Update, seconds: float) -> dict[str, Any]:
        """`meta_info`; the figures of the whole request come with the last update only."""
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": update.finish,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(update.output_ids),
            "cached_tokens": 0,
        }
        if request.return_logprob:
            meta |= self._logprobs(request, update)
        if update.finish is None:
            return meta
        meta["e2e_latency"] = seconds
        if update.running is not None:
            if self.arm.drafts:
                meta |= spec_figures(update.running, len(update.output_ids))
            meta["ddtree"] = self.ddtree(request, update.running, update.output_ids)
        return meta

    def ddtree(
        self, request: GenerateRequest, running: RunningRequest, output: Sequence[int]
    ) -> dict[str, Any]:
        """What SGLang has no field for."""
        stats = running.stats
        tree_arm = self.arm.builds_tree
        figures: dict[str, Any] = {
            "arm": self.arm.value,
            "budget": request.budget if tree_arm else None,
            "builder": request.builder.value if tree_arm and request.builder else None,
            "topk": self.topk if self.arm.drafts else None,
            "block": self.block,
            "stage_seconds": {stage: round(value, 6) for stage, value in stats.stage_seconds.items()},
            "tree_nodes": stats.tree_nodes,
            "tree_steps": stats.tree_steps,
        }
        if not self.arm.drafts:
            return figures
        scores = score(stats.steps, output)
        figures["steps_below_spine"] = scores.below_spine
        figures["steps_scored"] = scores.scored
        figures["spine_accept_length"] = scores.spine_accept_length
        if self.arm is Arm.SHADOW:
            figures["shadow_accept_length"] = scores.tree_accept_length
            figures["shadow_histogram"] = scores.tree_histogram
        if request.return_steps:
            figures["steps"] = tables(stats.steps)
        return figures

    def completion(
        self, request: GenerateRequest, text: str, update: Update, *, chat: bool, chunk: bool, details: bool
    ) -> dict[str, Any]:
        """An OpenAI answer or chunk with `text` as its content."""
        finish = update.finish["type"] if update.finish else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice["matched_stop"] = update.finish.get("matched") if update.finish else None
        if not chat:
            choice["text"] = text
        elif chunk:
            choice["delta"] = {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        kind = "chat.completion" if chat else "text_completion"
        answer: dict[str, Any] = {
            "id": request.rid,
            "object": "chat.completion.chunk" if chat and chunk else kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": [choice],
        }
        if not chunk:
            answer["usage"] = usage(request, update)
        if details and update.finish is not None and update.running is not None:
            figures = spec_figures(update.running, len(update.output_ids))
            spec = {"spec_tokens_details": figures} if figures else {}
            answer["sglext"] = spec | {"ddtree": self.ddtree(request, update.running, update.output_ids)}
        return answer

    def _logprobs(self, request: GenerateRequest, update: Update) -> dict[str, Any]:
        output = self._rows(update.output_ids, update.logprobs, request.text_in_logprobs)
        meta: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": output,
            "output_token_logprobs_length": len(output),
        }
        if request.top_logprobs:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = self._tops(update.logprobs, request.text_in_logprobs)
        if request.logprob_start is not None:
            ids = request.prompt_ids[request.logprob_start :]
            first = [[None, ids[0], self._text(ids[0], request.text_in_logprobs)]]
            rest = self._rows(ids[1:], update.prompt_logprobs, request.text_in_logprobs)
            meta["input_token_logprobs"] = first + rest
            if request.top_logprobs:
                tops = self._tops(update.prompt_logprobs, request.text_in_logprobs)
                meta["input_top_logprobs"] = [None, *tops]
        return meta

    def _rows(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: bool) -> list[list[Any]]:
        return [
            [entry.logprob, token, self._text(token, text)]
            for token, entry in zip(ids, logprobs, strict=False)
        ]

    def _tops(self, logprobs: Sequence[TokenLogprobs], text: bool) -> list[list[list[Any]]]:
        return [[[value, token, self._text(token, text)] for value, token in entry.top] for entry in logprobs]

    def _text(self, token: int, wanted: bool) -> str | None:
        return self.codec.decode([token], skip_special_tokens=False) if wanted else None


def spec_figures(running: RunningRequest, completion_tokens: int) -> dict[str, Any]:
    """SGLang's `spec_*` fields; empty before the first verify step."""
    stats = running.stats
    if stats.verify_steps == 0:
        return {}
    return {
        "spec_accept_rate": stats.accepted / stats.proposed if stats.proposed else 0.0,
        "spec_accept_length": completion_tokens / stats.verify_steps,
        "spec_num_correct_drafts": stats.accepted,
        "spec_num_proposed_drafts": stats.proposed,
        "spec_verify_ct": stats.verify_steps,
        "spec_correct_drafts_histogram": stats.histogram(),
    }


def usage(request: GenerateRequest, update: Update) -> dict[str, Any]:
    """OpenAI's token counts."""
    prompt, completion = len(request.prompt_ids), len(update.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
