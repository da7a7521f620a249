"""Stage 1: the target, next-token cross-entropy on random windows of the training stream."""

from __future__ import annotations

from pathlib import Path

import torch
from pair.data import Streams
from pair.model import Target
from pair.optim import Optimizer
from pair.run import Curve, Limits, autocast, compile_layers, compiled, generator, train
from torch import Tensor
from torch.nn import functional


def train_target(
    target: Target,
    streams: Streams,
    limits: Limits,
    curve: Curve,
    checkpoint: Path,
    *,
    batch: int = 64,
    length: int = 1024,
    muon_lr: float = 0.008,
    adam_lr: float = 0.004,
    seed: int = 0,
    compile_: bool = True,
) -> int:
    device = target.norm.weight.device
    tokens = torch.from_numpy(streams.train.astype("int32")).to(device)
    offsets = torch.arange(length + 1, device=device)
    compile_layers(target.layers, device, compile_)
    head = compiled(head_loss, device, compile_)

    def loss_at(step: int):  # noqa: ANN202
        starts = torch.randint(
            0, len(tokens) - length - 1, (batch, 1), device=device, generator=generator(device, seed, step)
        )
        ids = tokens[starts + offsets].long()
        with autocast(device):
            hidden, _ = target(ids[:, :-1])
            loss = head(hidden, target.embed_tokens.weight, ids[:, 1:])
        return loss, lambda: {"tokens": float((step + 1) * batch * length)}

    steps = train(target, Optimizer(target, muon_lr, adam_lr), loss_at, limits, curve, checkpoint, "target")
    curve.write(stage="target", step=steps, held_out_loss=held_out_loss(target, streams))
    return steps


def head_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden, embedding.to(hidden.dtype))
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def held_out_loss(target: Target, streams: Streams, windows: int = 64, length: int = 512) -> float:
    """Mean loss in nats per token over the first window of held-out files that are long enough."""
    device = target.norm.weight.device
    long = [x for x in streams.held_out if len(x) > length][:windows]
    if not long:
        return float("nan")
    ids = torch.stack([torch.from_numpy(x[: length + 1].astype("int64")) for x in long]).to(device)
    losses = []
    for part in ids.split(16):
        with autocast(device):
            x = target.embed_tokens(part[:, :-1])
            for layer in target.layers:
                x = layer.forward(x)  # not __call__: a compiled layer would compile again for this shape
            losses.append(head_loss(target.norm(x), target.embed_tokens.weight, part[:, 1:]))
    return float(torch.stack(losses).mean())
