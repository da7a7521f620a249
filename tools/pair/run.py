"""What both training stages share: device settings, the clock, the curve file, checkpoints that resume."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pair.optim import Optimizer, schedule
from torch import Tensor, nn


@dataclass
class Limits:
    """How long a stage runs: a number of steps, or seconds of training (compilation counts)."""

    steps: int | None = None
    seconds: float | None = None
    stop_at: int | None = None  # leave early at this step, keeping the schedule: the run can be resumed

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give either steps or seconds")

    def progress(self, step: int, elapsed: float) -> float:
        return step / self.steps if self.steps is not None else elapsed / float(self.seconds or 1)


@dataclass
class Curve:
    """A JSONL file of training figures."""

    path: Path
    echo: bool = True
    start: float = field(default_factory=time.monotonic)

    def write(self, **figures: Any) -> None:
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()}
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(rounded) + "\n")
        if self.echo:
            print(f"[{time.monotonic() - self.start:7.1f}]", json.dumps(rounded), flush=True)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_at: Callable[[int], tuple[Tensor, Callable[[], dict[str, float]]]],
    limits: Limits,
    curve: Curve,
    checkpoint: Path,
    stage: str,
    every: int = 100,
) -> int:
    """Run the loop; resume from `checkpoint` if it is there. Returns the number of steps done.

    `loss_at(step)` must depend on the step and the seed only, so that a resumed run sees the same batches.
    """
    step, spent = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=next(model.parameters()).device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["spent"]
    begin = time.monotonic() - spent
    cuda = next(model.parameters()).is_cuda
    while True:
        progress = limits.progress(step, time.monotonic() - begin)
        if progress >= 1 or (limits.stop_at is not None and step >= limits.stop_at):
            break
        loss, figures = loss_at(step)
        loss.backward()
        norm = optimizer.step(schedule(progress))
        model.hold_constant_()  # type: ignore[operator]
        step += 1
        if cuda and step % 10 == 0:
            torch.cuda.synchronize()  # the host must not run ahead of the clock
        if step % every == 0 or step in (1, 5, 20, 40):
            elapsed = time.monotonic() - begin
            curve.write(
                stage=stage, step=step, seconds=elapsed, progress=progress, loss=loss.item(),
                norm=norm.item(), **figures(),
            )  # fmt: skip
            if not loss.isfinite():
                raise RuntimeError(f"{stage}: the loss is {loss.item()} at step {step}")
    spent = time.monotonic() - begin
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
    torch.save(state, checkpoint)
    return step


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def generator(device: torch.device, seed: int, step: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)


def compiled(function: Callable[..., Any], device: torch.device, on: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if on and device.type == "cuda" else function


def compile_layers(layers: nn.ModuleList, device: torch.device, on: bool) -> None:
    if on and device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        for layer in layers:
            layer.compile(dynamic=False)
