"""Stage 2: the drafter, cross-entropy against the target's own greedy tokens at every block position."""

from __future__ import annotations

from pathlib import Path

import torch
from pair.generate import Continuations
from pair.model import Drafter, Target
from pair.optim import Optimizer
from pair.run import Curve, Limits, autocast, compile_layers, compiled, generator, train
from torch import Tensor
from torch.nn import functional


def train_drafter(
    drafter: Drafter,
    target: Target,
    data: Continuations,
    limits: Limits,
    curve: Curve,
    checkpoint: Path,
    *,
    batch: int = 64,
    anchors: int = 48,
    reach: float = 5.0,
    muon_lr: float = 0.008,
    adam_lr: float = 0.003,
    seed: int = 0,
    compile_: bool = True,
) -> int:
    """Block position i weighs exp(-(i - 1) / reach): an early miss costs the rest of the block."""
    device = drafter.norm.weight.device
    shape = drafter.shape
    embedding = target.embed_tokens.weight.detach()
    for p in target.parameters():
        p.requires_grad_(False)
    ahead = torch.arange(1, shape.block, device=device)
    weights = torch.exp(-(ahead - 1).float() / reach)
    compile_layers(drafter.layers, device, compile_)
    compile_layers(target.layers, device, compile_)
    head = compiled(block_loss, device, compile_)
    length = data.ids.shape[1]

    def loss_at(step: int):  # noqa: ANN202
        draw = generator(device, seed, step)
        rows = torch.randint(0, len(data.ids), (batch,), device=device, generator=draw)
        ids = data.ids[rows].long()
        start, limit = data.start[rows], data.limit[rows]
        spread = torch.rand(batch, anchors, device=device, generator=draw)
        at = (start[:, None] + spread * (limit - 1 - start)[:, None]).long()
        labelled = at[..., None] + ahead
        labels = ids.gather(1, labelled.clamp(max=length - 1).flatten(1)).view_as(labelled)
        weight = weights * (labelled < limit[:, None, None])
        with autocast(device):
            with torch.no_grad():
                _, features = target(ids, shape.features)
            hidden = drafter(embedding, ids, features, at)
            loss, each = head(hidden, embedding, labels, weight)

        def figures() -> dict[str, float]:
            return {
                "anchors": float((step + 1) * batch * anchors),
                **{f"hit{i + 1}": each[i].item() for i in (0, 1, 2, 4, 7)},
            }

        return loss, figures

    return train(drafter, Optimizer(drafter, muon_lr, adam_lr), loss_at, limits, curve, checkpoint, "drafter")


def block_loss(hidden: Tensor, embedding: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and the share of right top-1 tokens per block position [F - 1]."""
    logits = functional.linear(hidden, embedding.to(hidden.dtype)).float()
    ce = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(weight)
    seen = (weight > 0).float()
    right = (logits.detach().argmax(-1) == labels).float() * seen
    return (ce * weight).sum() / weight.sum(), right.sum((0, 1)) / seen.sum((0, 1)).clamp(min=1)
