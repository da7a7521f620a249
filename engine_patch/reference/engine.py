"""The decode loops: one request at a time is advanced by one prefill chunk or one step of its arm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from ddtree_engine.reference.cache import DrafterCache, TargetCache
from ddtree_engine.reference.drafter import Candidates, Drafter
from ddtree_engine.reference.errors import InputError
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.shape import PassShape, chain_shape, tree_shape, unsafe_shape
from ddtree_engine.reference.stats import RequestStats, StepRecord
from ddtree_engine.reference.target import PREFILL_CHUNK, Target
from ddtree_engine.tree import Accepted, Builder, Calibration, Tree, build_tree, chain_tree, walk
from torch import Tensor

# Rows past the context that a last step's tree or block may reach.
SLACK = 256


class Arm(StrEnum):
    """What is drafted and what is verified."""

    AR = "ar"
    DFLASH = "dflash"
    SHADOW = "shadow"
    DDTREE = "ddtree"
    UNSAFE = "unsafe"

    @property
    def drafts(self) -> bool:
        """Whether the arm uses the drafter."""
        return self is not Arm.AR

    @property
    def builds_tree(self) -> bool:
        """Whether the arm builds trees."""
        return self in (Arm.SHADOW, Arm.DDTREE, Arm.UNSAFE)

    @property
    def verifies_tree(self) -> bool:
        """Whether the arm's target pass runs a whole tree."""
        return self in (Arm.DDTREE, Arm.UNSAFE)


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token's log-probability and the most probable tokens at its position."""

    logprob: float
    top: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Emitted:
    """Tokens of one step in order, with log-probabilities when the request asked for them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class RunningRequest:
    """One running request. `output` holds every token emitted; the last one is not in the caches yet."""

    request: GenerateRequest
    target_cache: TargetCache
    drafter_cache: DrafterCache | None
    stats: RequestStats = field(default_factory=RequestStats)
    prefilled: int = 0
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are left."""
        return self.prefilled < len(self.request.prompt_ids)


class Engine:
    """A target, its drafter and one arm's decode loop. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        arm: Arm,
        target: Target,
        drafter: Drafter | None,
        *,
        topk: int = 16,
        calibration: Calibration | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.arm = arm
        self.target = target
        self.drafter = drafter if arm.drafts else None
        self.topk = topk
        self.calibration = calibration
        self.dtype = dtype
        if arm.drafts and drafter is None:
            raise InputError(f"arm {arm.value!r} needs a drafter")
        if self.drafter is not None:
            target.capture = self.drafter.config.target_layer_ids

    @classmethod
    def load(
        cls,
        arm: Arm,
        model: Path,
        drafter: Path | None,
        *,
        context_length: int,
        topk: int = 16,
        calibration: Calibration | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Engine:
        """Read both checkpoints. Raises `InputError` naming what doesn't fit."""
        positions = context_length + SLACK
        target = Target.load(model, dtype, positions)
        loaded = None
        if arm.drafts:
            if drafter is None:
                raise InputError(f"arm {arm.value!r} needs a drafter")
            loaded = Drafter.load(drafter, target.config, dtype, positions)
        return cls(arm, target, loaded, topk=topk, calibration=calibration, dtype=dtype)

    def start(self, request: GenerateRequest) -> RunningRequest:
        """A request with empty caches."""
        # Longer outputs make the caches grow.
        capacity = len(request.prompt_ids) + min(request.max_new_tokens, SLACK)
        drafter_cache = None
        if self.drafter is not None:
            drafter_cache = DrafterCache.empty(self.drafter.config, capacity, self.dtype)
        cache = TargetCache.empty(self.target.config, capacity, self.dtype)
        return RunningRequest(request, cache, drafter_cache)

    @torch.inference_mode()
    def advance(self, sequence: RunningRequest) -> Emitted:
        """Run one prefill chunk (a token comes with the last one) or one decode step (one token or more)."""
        if sequence.in_prefill:
            return self._prefill(sequence)
        if self.arm is Arm.AR:
            return self._plain_step(sequence)
        return self._speculative_step(sequence)

    def _prefill(self, sequence: RunningRequest) -> Emitted:
        request, start = sequence.request, sequence.prefilled
        chunk = torch.tensor(request.prompt_ids[start : start + PREFILL_CHUNK])
        result = self.target.prefill(chunk, sequence.target_cache)
        if self.drafter is not None and sequence.drafter_cache is not None:
            self.drafter.extend(result.features, sequence.drafter_cache)
        sequence.prefilled += len(chunk)
        if request.return_logprob and request.logprob_start is not None:
            self._score_prompt(sequence, result.hidden, start)
        if sequence.in_prefill or request.max_new_tokens == 0:
            return Emitted([])
        logits = self.target.logits(result.hidden[-1:])
        return self._emit(sequence, request.sampler.choose(logits, [sequence.prefilled]).tolist(), logits)

    def _score_prompt(self, sequence: RunningRequest, hidden: Tensor, start: int) -> None:
        """Log-probabilities of the prompt's tokens from `logprob_start` + 1 on, given the ones before."""
        request = sequence.request
        assert request.logprob_start is not None
        first = max(start, request.logprob_start)
        last = min(start + hidden.shape[0], len(request.prompt_ids) - 1)
        if first >= last:
            return
        logits = self.target.logits(hidden[first - start : last - start])
        following = list(request.prompt_ids[first + 1 : last + 1])
        sequence.prompt_logprobs += self._logprobs(request, following, logits)

    def _plain_step(self, sequence: RunningRequest) -> Emitted:
        seconds = sequence.stats.stage_seconds
        with _timed(seconds, "verify"):
            result = self.target.step(sequence.output[-1], sequence.target_cache)
            logits = self.target.logits(result.hidden)
            tokens = sequence.request.sampler.choose(logits, [sequence.target_cache.length])
        return self._emit(sequence, tokens.tolist(), logits)

    def _speculative_step(self, sequence: RunningRequest) -> Emitted:
        cache, seconds, request = sequence.target_cache, sequence.stats.stage_seconds, sequence.request
        with _timed(seconds, "draft"):
            candidates = self._draft(sequence)
        ids, logprobs = candidates.ids.numpy(), candidates.logprobs.numpy()
        with _timed(seconds, "build"):
            built = self._build(request, sequence.output[-1], ids, logprobs)
            tree = (
                built
                if built is not None and self.arm.verifies_tree
                else self._chain(sequence, ids, logprobs)
            )
            shape = self.shape_of(tree)
        with _timed(seconds, "verify"):
            result = self.target.verify(torch.from_numpy(tree.tokens), shape, cache)
            logits = self.target.logits(result.hidden)
            following = (tree.depths + (cache.length + 1)).tolist()
            accepted = walk(tree, request.sampler.choose(logits, following))
        with _timed(seconds, "commit"):
            path = torch.tensor(accepted.path)
            assert result.stash is not None
            assert self.drafter is not None
            assert sequence.drafter_cache is not None
            self.target.commit(result.stash, path, self._recurrent_path(accepted), cache)
            self.drafter.extend(result.features[path], sequence.drafter_cache)
        self._record(
            sequence, StepRecord(len(sequence.output) - 1, ids, logprobs, built, accepted.matched), tree
        )
        tokens = [int(tree.tokens[node]) for node in accepted.path[1:]] + [accepted.bonus]
        return self._emit(sequence, tokens, logits[path] if request.return_logprob else logits[:0])

    def _draft(self, sequence: RunningRequest) -> Candidates:
        """One drafter pass: the block is the bonus token and F - 1 mask tokens."""
        assert self.drafter is not None
        assert sequence.drafter_cache is not None
        config = self.drafter.config
        block = torch.full((config.block_size,), config.mask_token_id)
        block[0] = sequence.output[-1]
        hidden = self.drafter.hidden(self.target.embed(block), sequence.drafter_cache)
        logits = self.target.logits(hidden[1:])
        values, ids = logits.topk(min(self.topk, logits.shape[-1]), dim=-1)
        return Candidates(ids, values - torch.logsumexp(logits, dim=-1, keepdim=True))

    def _build(
        self, request: GenerateRequest, root: int, ids: np.ndarray, logprobs: np.ndarray
    ) -> Tree | None:
        if not self.arm.builds_tree:
            return None
        builder = request.builder or Builder.BEST_FIRST
        calibration = self.calibration if builder is Builder.CALIBRATED else None
        return build_tree(root, ids, logprobs, request.budget or 0, builder, calibration)

    def _chain(self, sequence: RunningRequest, ids: np.ndarray, logprobs: np.ndarray) -> Tree:
        return chain_tree(sequence.output[-1], ids, logprobs, len(ids))

    def shape_of(self, tree: Tree) -> PassShape:
        """Who follows whom in the arm's verify pass of this tree."""
        taps = self.target.config.conv_kernel
        if not self.arm.verifies_tree:
            return chain_shape(tree.width, taps)
        return unsafe_shape(tree, taps) if self.arm is Arm.UNSAFE else tree_shape(tree, taps)

    def _recurrent_path(self, accepted: Accepted) -> Tensor:
        """Rows that recurrent layers take over: the accepted ones; for `unsafe` all up to the last."""
        if self.arm is Arm.UNSAFE:
            return torch.arange(accepted.path[-1] + 1)
        return torch.tensor(accepted.path)

    def _record(self, sequence: RunningRequest, step: StepRecord, verified: Tree) -> None:
        stats = sequence.stats
        stats.steps.append(step)
        if self.arm.verifies_tree:
            stats.proposed += sequence.request.budget or 0
            stats.tree_nodes += verified.width
            stats.tree_steps += 1
        else:
            stats.proposed += verified.budget

    def _emit(self, sequence: RunningRequest, tokens: list[int], logits: Tensor) -> Emitted:
        sequence.output += tokens
        if not sequence.request.return_logprob:
            return Emitted(tokens)
        return Emitted(tokens, self._logprobs(sequence.request, tokens, logits))

    def _logprobs(
        self, request: GenerateRequest, tokens: Sequence[int], logits: Tensor
    ) -> list[TokenLogprobs]:
        rows = request.sampler.logprobs(logits)
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        if request.top_logprobs == 0:
            return [TokenLogprobs(value, ()) for value in chosen]
        values, ids = rows.topk(min(request.top_logprobs, rows.shape[-1]), dim=-1)
        tops = [
            tuple(zip(row, names, strict=True))
            for row, names in zip(values.tolist(), ids.tolist(), strict=True)
        ]
        return [TokenLogprobs(value, top) for value, top in zip(chosen, tops, strict=True)]


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - started
