"""Accept lengths of the pair on greedy text, decode step by decode step.

Verification is lossless, so at T=0 the text is the target's own greedy text whatever is drafted. The loop
therefore runs on that text: draft at the anchor from the features before it, count what the chain or the tree
holds of the following tokens, move on by that and the bonus token. `tests` compare it with the engine's loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ddtree_engine.tree import Builder, build_tree, chain_accept, tree_accept
from pair.model import Drafter, Target
from pair.run import autocast
from torch import Tensor
from torch.nn import functional

BUDGETS = (7, 15, 31, 63, 127)
TOPK = 16


@dataclass(frozen=True)
class Text:
    """`ids`: prompt and greedy continuation; `start`: prompt length."""

    ids: list[int]
    start: int


def candidates(target: Target, drafter: Drafter, text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Top-K ids and log-probabilities [anchors, F-1, K], one anchor per generated token but the last."""
    top = block_logits(target, drafter, text).log_softmax(-1).topk(TOPK)
    return top.indices.cpu().numpy(), top.values.cpu().numpy()


@torch.no_grad()
def block_logits(target: Target, drafter: Drafter, text: Text) -> Tensor:
    """The drafter's logits, fp32 [anchors, F-1, V]."""
    device = target.norm.weight.device
    ids = torch.tensor([text.ids], device=device)
    embedding = target.embed_tokens.weight
    with autocast(device):
        x, taken = target.embed_tokens(ids), []
        for i, layer in enumerate(target.layers):
            x = layer.forward(x)
            if i in drafter.shape.features:
                taken.append(x)
        anchors = torch.arange(text.start, len(text.ids) - 1, device=device)[None]
        hidden = drafter_forward(drafter, embedding, ids, torch.cat(taken, -1), anchors)
        return functional.linear(hidden, embedding.to(hidden.dtype))[0].float()


def drafter_forward(drafter: Drafter, embedding: Tensor, ids: Tensor, features: Tensor, at: Tensor) -> Tensor:
    """As `Drafter.forward` without compiled layers."""
    context = drafter.hidden_norm(drafter.fc(features))
    first = embedding[ids.gather(1, at)][:, :, None]
    masks = embedding[drafter.shape.mask_token].expand(*at.shape, drafter.shape.block - 1, -1)
    x = torch.cat([first, masks], 2)
    for layer in drafter.layers:
        x = layer.forward(x, context, at)
    return drafter.norm(x[:, :, 1:])


def walk(
    text: Text, ids: np.ndarray, logprobs: np.ndarray, budget: int | None, builder: Builder
) -> list[int]:
    """Accept length of each step of a request; budget None is the chain. The last step may be cut short."""
    steps, at = [], text.start
    while at < len(text.ids) - 1:
        truth = text.ids[at + 1 :]
        row = at - text.start
        if budget is None:
            matched = chain_accept(ids[row, :, 0].tolist(), truth)
        else:
            matched = tree_accept(build_tree(text.ids[at], ids[row], logprobs[row], budget, builder), truth)
        steps.append(min(matched + 1, len(truth)))
        at += matched + 1
    return steps


def accept_lengths(
    target: Target,
    drafter: Drafter,
    texts: list[Text],
    budgets: tuple[int, ...] = BUDGETS,
    builders: tuple[Builder, ...] = (Builder.BEST_FIRST,),
) -> dict[str, Any]:
    """Mean over requests of tokens per verify step: {"chain": x, "best-first": {7: x, ...}}."""
    means: dict[tuple[str, int | None], list[float]] = {}
    for text in texts:
        ids, logprobs = candidates(target, drafter, text)
        arms: list[tuple[str, int | None, Builder]] = [("chain", None, Builder.BEST_FIRST)]
        arms += [(b.value, n, b) for b in builders for n in budgets]
        for name, budget, builder in arms:
            steps = walk(text, ids, logprobs, budget, builder)
            means.setdefault((name, budget), []).append(sum(steps) / len(steps))
    out: dict[str, Any] = {"prompts": len(texts), "chain": float(np.mean(means[("chain", None)]))}
    for builder in builders:
        out[builder.value] = {n: float(np.mean(means[(builder.value, n)])) for n in budgets}
    return out
