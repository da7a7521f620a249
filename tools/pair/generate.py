"""Greedy continuations of training text by the target: what the drafter learns to foresee."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from pair import delta_rule
from pair.data import EOS
from pair.model import Cache, Target
from pair.run import compiled
from torch import Tensor
from torch.nn import functional

MAX_PERIOD = 48


@dataclass(frozen=True)
class Continuations:
    """`ids` [N, L] prompt and continuation; `start` [N] prompt length; `limit` [N] first useless position."""

    ids: Tensor
    start: Tensor
    limit: Tensor


@torch.no_grad()
def greedy(
    target: Target, prompts: Tensor, count: int, stop: Callable[[list[int]], bool] | None = None
) -> Tensor:
    """prompts [B, P] of equal length -> [B, P + count]; shorter once `stop` holds for the first row's output.

    `stop` is asked after every 16th token.
    """
    cache = Cache(room=prompts.shape[1] + count)
    out, ids = [prompts], prompts
    for done in range(count):
        if stop is not None and done and done % 16 == 0 and stop(torch.cat(out[1:], 1)[0].tolist()):
            break
        hidden = run_layers(target, ids, cache)
        logits = functional.linear(hidden[:, -1], target.embed_tokens.weight)
        ids = logits.argmax(-1, keepdim=True)
        out.append(ids)
    return torch.cat(out, 1)


def run_layers(target: Target, ids: Tensor, cache: Cache) -> Tensor:
    x = target.embed_tokens(ids)
    for layer in target.layers:
        x = layer.forward(x, cache)  # not __call__: decode shapes are not worth compiling
    cache.length += ids.shape[1]
    return target.norm(x[:, -1:])


@torch.no_grad()
def continuations(
    target: Target,
    prompts: list[Tensor],
    length: int,
    minimum: int = 48,
    compile_: bool = True,
) -> Continuations:
    """Continue every batch of prompts [B, P] to `length` tokens; loops and text after EOS lie past `limit`.

    Sequences with fewer than `minimum` useful tokens are dropped. Runs in bf16 on a card.
    """
    device = target.norm.weight.device
    model = copy.deepcopy(target)
    if device.type == "cuda":
        model = model.bfloat16()
        delta_rule.decay_and_add_ = compiled(delta_rule.decay_and_add_, device, compile_)
    parts = []
    for batch in prompts:
        ids = greedy(model, batch, length - batch.shape[1])
        start = torch.full((len(ids),), batch.shape[1], device=device)
        limit = useful_limit(ids, batch.shape[1])
        keep = limit - start >= minimum
        parts.append((ids[keep].to(torch.int16), start[keep], limit[keep]))
    return Continuations(*(torch.cat(x) for x in zip(*parts, strict=True)))


def useful_limit(ids: Tensor, start: int) -> Tensor:
    """First position [B] after EOS, or one repeat after the text began to loop to its end; else L."""
    length = ids.shape[1]
    where = torch.arange(length, device=ids.device)
    ends = torch.where((ids == EOS) & (where >= start), where, length).amin(1)
    limit = (ends + 1).clamp(max=length)
    for period in range(1, MAX_PERIOD + 1):
        same = (ids[:, period:] == ids[:, :-period]).flip(1)
        run = same.int().cumprod(1).sum(1)  # positions at the end equal to the one a period before
        looping = run >= max(2 * period, 32)
        limit = torch.where(looping, torch.minimum(limit, length - run), limit)
    return limit


def loops(ids: list[int], max_period: int = MAX_PERIOD, least: int = 32) -> bool:
    """Whether `least` tokens or more, and two periods or more, in a row repeat what came a period before."""
    x = np.asarray(ids)
    for period in range(1, min(max_period, len(x) - 1) + 1):
        run = 0
        for same in x[period:] == x[:-period]:
            run = run + 1 if same else 0
            if run >= max(2 * period, least):
                return True
    return False


def training_prompts(
    tokens: np.ndarray, line_end: np.ndarray, lengths: tuple[int, ...], batch: int, count: int, seed: int
) -> list[np.ndarray]:
    """`count` batches [batch, P] of windows that end just before a token that opens a new line.

    `line_end` [V] marks tokens that begin with a newline; windows with a document end inside are left out.
    """
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        size = lengths[i % len(lengths)]
        rows: list[np.ndarray] = []
        while len(rows) < batch:
            ends = rng.integers(size, len(tokens) - 1, 4 * batch)
            ends = ends[line_end[tokens[ends]]]
            windows = tokens[ends[:, None] - size + np.arange(size)]
            rows.extend(windows[(windows != EOS).all(1)])
        out.append(np.stack(rows[:batch]).astype(np.int64))
    return out
