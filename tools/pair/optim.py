"""Muon for matrices inside the layers, AdamW for the rest, one schedule for both.

Muon (Jordan et al., 2024): momentum, then an approximate orthogonalisation of the update by Newton-Schulz
iterations. Matrices of one shape go through it as one batch, because a small model has many small ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """Both optimizers of one model. `step(scale)` applies the learning rates times `scale`."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, decay: float = 0.1) -> None:
        matrices, tables, vectors = split_parameters(model)
        self.muon = Muon(matrices, muon_lr, decay=decay)
        self.adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam_lr,
            betas=(0.9, 0.95),
            fused=next(model.parameters()).is_cuda,
        )
        self.adam_lr = adam_lr
        self.parameters = [*matrices, *tables, *vectors]

    def step(self, scale: float, clip: float = 1.0) -> Tensor:
        """One update; returns the norm of Adam's part of the gradient before clipping (Muon needs none)."""
        adam_parameters = [p for group in self.adam.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(adam_parameters, clip)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.muon.step(scale)
        for p in self.parameters:
            p.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": self.muon.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.momenta, state["muon"], strict=True):
            mine.copy_(saved)


class Muon:
    def __init__(
        self, parameters: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in parameters:
            by_shape[tuple(p.shape)].append(p)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        self.lr, self.momentum, self.decay = lr, momentum, decay

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group, buffer in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([p.grad for p in group])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum))
            # The usual RMS-matching factor: updates of any shape have about the size of Adam's.
            rows, columns = group[0].shape
            update = update * (self.lr * scale * 0.2 * max(rows, columns) ** 0.5)
            torch._foreach_mul_(group, 1 - self.lr * scale * self.decay)
            torch._foreach_sub_(group, list(update.to(group[0].dtype).unbind(0)))


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, of a batch [N, R, C] (bf16 is enough)."""
    a, b, c = NEWTON_SCHULZ
    x = x.bfloat16() if x.is_cuda else x.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.transpose(-1, -2)
        x = a * x + (b * s + c * s @ s) @ x
    return x.transpose(-1, -2) if tall else x


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Matrices of the layers (and fc), embedding tables and small gates, vectors."""
    matrices, tables, vectors = [], [], []
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed_tokens" not in name and min(p.shape) > 16:
            matrices.append(p)
        elif p.ndim >= 2:
            tables.append(p)
        else:
            vectors.append(p)
    return matrices, tables, vectors


def schedule(progress: float, warm: float = 0.02, hold: float = 0.45, floor: float = 0.02) -> float:
    """Factor on the learning rate at `progress` in [0, 1]: warm up, hold, then linear down to `floor`."""
    if progress < warm:
        return max(progress / warm, 0.02)
    if progress < hold:
        return 1.0
    return floor + (1 - floor) * max(0.0, 1 - progress) / (1 - hold)
