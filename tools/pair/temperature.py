"""Temperature of the drafter: a scale on its final norm, fitted on calibration prompts.

A drafter that saw its training text many times is too sure of itself. Scaling its logits leaves the chain as
it is and moves the budget from deep unlikely nodes to siblings. The scale is folded into `norm.weight`.
"""

from __future__ import annotations

import numpy as np
import torch
from ddtree_engine.tree import Builder
from pair.evaluate import TOPK, Text, block_logits, walk
from pair.model import Drafter, Target
from torch.nn import functional


@torch.no_grad()
def sweep(
    target: Target, drafter: Drafter, texts: list[Text], temperatures: list[float], budgets: tuple[int, ...]
) -> list[dict[str, float]]:
    """Per temperature: negative log-likelihood of the next blocks and mean accept length per budget."""
    logits = [block_logits(target, drafter, text) for text in texts]
    out = []
    for temperature in temperatures:
        losses, means = [], {n: [] for n in budgets}
        for text, raw in zip(texts, logits, strict=True):
            logprobs = (raw / temperature).log_softmax(-1)
            losses.append(likelihood(text, logprobs))
            top = logprobs.topk(TOPK)
            ids, values = top.indices.numpy(), top.values.numpy()
            for n in budgets:
                steps = walk(text, ids, values, n, Builder.BEST_FIRST)
                means[n].append(sum(steps) / len(steps))
        record = {"temperature": temperature, "nll": float(np.mean(losses))}
        out.append(record | {str(n): float(np.mean(x)) for n, x in means.items()})
    return out


def likelihood(text: Text, logprobs: torch.Tensor) -> float:
    """Mean negative log-probability of the true tokens of all whole blocks."""
    width = logprobs.shape[1]
    labels = torch.tensor(text.ids[text.start + 1 :])
    whole = len(labels) - width + 1
    wanted = labels.unfold(0, width, 1)[:whole]
    return float(functional.nll_loss(logprobs[:whole].flatten(0, 1), wanted.flatten())) if whole > 0 else 0.0


@torch.no_grad()
def fold(drafter: Drafter, temperature: float) -> None:
    drafter.norm.weight.div_(temperature)
