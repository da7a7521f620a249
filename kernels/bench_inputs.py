"""Inputs of the kernel benchmark: layers of Qwen3.6-27B's shape, trees, and adversarial keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# a, b, A_log, dt_bias, q, k, v, state_pool, slots
VerifyArgs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's gated delta nets."""

    layers: int = 48
    heads: int = 16
    value_heads: int = 48
    key_dim: int = 128
    value_dim: int = 128
    window: int = 4
    block: int = 16

    @property
    def channels(self) -> int:
        """Convolved channels: q, k and v side by side."""
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """One request's float32 state over all layers."""
        return self.layers * self.value_heads * self.key_dim * self.value_dim * 4


QWEN36_27B = Shape()
TINY = Shape(layers=1, heads=1, value_heads=2, key_dim=16, value_dim=16, block=4)


@dataclass(frozen=True)
class Inputs:
    """Stacked layers [L, ...] for N requests of Q nodes, as SGLang's tree verify gets them."""

    x: Tensor  # [L, N, Q, C]
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    weight: Tensor
    conv_pool: Tensor
    state_pool: Tensor
    slots: Tensor
    parents: Tensor
    shape: Shape

    def qkv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views q, k [N, Q, H, K], v [N, Q, HV, V] of a layer's inputs."""
        shape, x = self.shape, self.x[layer]
        keys = shape.heads * shape.key_dim
        q, k, v = x[..., :keys], x[..., keys : 2 * keys], x[..., 2 * keys :]
        rows = x.shape[:2]
        return (
            q.view(*rows, shape.heads, shape.key_dim),
            k.view(*rows, shape.heads, shape.key_dim),
            v.view(*rows, shape.value_heads, shape.value_dim),
        )

    def verify_args(self, layer: int) -> VerifyArgs:
        """Everything the verify forms take up to the slots."""
        gates = (self.a[layer], self.b[layer], self.A_log[layer], self.dt_bias[layer])
        return (*gates, *self.qkv(layer), self.state_pool[layer], self.slots)


def random_parents(batch: int, width: int, max_depth: int, seed: int = 0) -> Tensor:
    """int64[N, Q] on the CPU: a spine, then nodes under random parents, none deeper than `max_depth`."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, width), -1, dtype=torch.int64)
    for request in range(batch):
        depth = [0]
        for row in range(1, width):
            parent = row - 1 if row <= max_depth else int(torch.randint(0, row, (1,), generator=generator))
            while depth[parent] >= max_depth:
                parent = int(parents[request, parent])
            parents[request, row] = parent
            depth.append(depth[parent] + 1)
    return parents


def random_inputs(
    shape: Shape, batch: int, width: int, device: torch.device, layers: int | None = None, seed: int = 0
) -> Inputs:
    """Random bfloat16 inputs and float32 states."""
    generator = torch.Generator(device=device).manual_seed(seed)
    layers = shape.layers if layers is None else layers

    def rand(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    heads = shape.value_heads
    return Inputs(
        x=rand(layers, batch, width, shape.channels),
        a=rand(layers, batch, width, heads),
        b=rand(layers, batch, width, heads),
        A_log=rand(layers, heads, dtype=torch.float32) * 0.5,
        dt_bias=rand(layers, heads, dtype=torch.float32),
        weight=rand(layers, shape.channels, shape.window),
        conv_pool=rand(layers, batch + 1, shape.channels, shape.window - 1),
        state_pool=rand(layers, batch + 1, heads, shape.value_dim, shape.key_dim, dtype=torch.float32),
        slots=torch.arange(batch, device=device).flip(0) + 1,
        parents=random_parents(batch, width, shape.block - 1, seed).to(device),
        shape=shape,
    )


def adversarial_inputs(
    shape: Shape, parents: Tensor, cosine: float, beta: float, decay: float, device: torch.device
) -> Inputs:
    """One layer whose keys have this mean cosine, with constant write strength and log decay."""
    batch, width = parents.shape
    inputs = random_inputs(shape, batch, width, device, layers=1, seed=1)
    keys = slice(shape.heads * shape.key_dim, 2 * shape.heads * shape.key_dim)
    common = inputs.x[0, 0, 0, keys].float()
    noise = inputs.x[0, ..., keys].float()
    inputs.x[0, ..., keys] = (cosine**0.5 * common + (1 - cosine) ** 0.5 * noise).to(inputs.x.dtype)
    inputs.a.fill_(1.0)
    inputs.b.fill_(math.log(beta / (1 - beta)))
    inputs.dt_bias.zero_()
    inputs.A_log.fill_(math.log(-decay / math.log1p(math.e)))
    inputs.parents.copy_(parents)
    return inputs


CAPTURED = Path(__file__).with_name("pair_inputs.npz")


def captured_inputs(device: torch.device, path: Path = CAPTURED) -> Iterator[tuple[str, Inputs]]:
    """Layers as the small trained pair saw them, on their own chain and on a tree; nothing without the file.

    The file holds per label: x [Q, C] after the convolution, a, b [Q, HV], A_log, dt_bias [HV], state
    [HV, V, K], parents [Q] and heads [2] (H and HV), as `tools/gpu/kernels_plan.py --capture` writes them.
    """
    if not path.is_file():
        return
    with np.load(path) as arrays:
        for label in sorted({name.split("/")[0] for name in arrays.files}):
            found = {
                name: torch.from_numpy(arrays[f"{label}/{name}"]).to(device)
                for name in ("x", "a", "b", "A_log", "dt_bias", "state", "parents", "heads")
            }
            heads, value_heads = found["heads"].tolist()
            value_dim, key_dim = found["state"].shape[1:]
            shape = Shape(1, heads, value_heads, key_dim, value_dim)
            template = random_inputs(shape, 1, len(found["parents"]), device, layers=1)
            changes: dict[str, Any] = {
                name: found[name].to(torch.bfloat16)[None, None] for name in ("x", "a", "b")
            }
            changes |= {name: found[name].float()[None] for name in ("A_log", "dt_bias")}
            changes["state_pool"] = found["state"].float()[None, None].expand(1, 2, -1, -1, -1).contiguous()
            made = replace(template, **changes, parents=found["parents"].long()[None])
            yield label, made
            yield f"{label}-tree", replace(made, parents=template.parents)
