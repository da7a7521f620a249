"""The accept walk on the GPU: one program per request, one reduction per accepted node."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

MAX_WIDTH = 1024


class Walks(NamedTuple):
    """path int64[N, P] (-1 after the end), counts, bonus, leaf int64[N], as `accept_walk_naive` has them."""

    path: Tensor
    counts: Tensor
    bonus: Tensor
    leaf: Tensor


@triton.jit
def _accept_walk_kernel(
    tokens,
    parents,
    node_tokens,
    path,
    counts,
    bonus,
    leaf,
    stride_tn,
    stride_pn,
    stride_cn,
    Q,
    P: tl.constexpr,
    BQ: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BQ)
    valid = lane < Q
    token = tl.load(tokens + request * stride_tn + lane, mask=valid, other=-1).to(tl.int64)
    parent = tl.load(parents + request * stride_pn + lane, mask=valid & (lane > 0), other=-1).to(tl.int32)
    choice = tl.load(node_tokens + request * stride_cn + lane, mask=valid, other=-1).to(tl.int64)
    path += request * P
    node = 0
    wanted = tl.sum(tl.where(lane == 0, choice, 0))
    count = 1
    going = 1
    tl.store(path, tl.full((), 0, tl.int64))
    for step in range(1, P):
        fits = valid & (parent == node) & (token == wanted) & (lane > 0) & (going == 1)
        child = tl.min(tl.where(fits, lane, BQ))
        going = tl.where(child < BQ, 1, 0)
        tl.store(path + step, tl.where(going == 1, child, -1).to(tl.int64))
        node = tl.where(going == 1, child, node)
        wanted = tl.sum(tl.where(lane == node, choice, 0))
        count += going
    tl.store(counts + request, count)
    tl.store(bonus + request, wanted)
    tl.store(leaf + request, node)


def empty_walks(batch: int, max_path: int, device: torch.device) -> Walks:
    """Buffers for `accept_walk_unchecked`, to be kept across CUDA graph replays."""
    rows = [torch.empty(batch, dtype=torch.int64, device=device) for _ in range(3)]
    return Walks(torch.empty(batch, max_path, dtype=torch.int64, device=device), *rows)


def accept_walk(
    tokens: Tensor, parents: Tensor, node_tokens: Tensor, max_path: int, out: Walks | None = None
) -> Walks:
    """Walk every tree; arguments and results as `accept_walk_naive`. Unit stride over Q.

    No synchronisation, and with `out` no allocation. Raises `KernelInputError`.
    """
    if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= MAX_WIDTH:
        raise KernelInputError(f"tokens: found shape {list(tokens.shape)}, allowed is [N, 1..{MAX_WIDTH}]")
    if max_path < 1:
        raise KernelInputError(f"max_path: found {max_path}, allowed is 1 or more")
    batch, width = tokens.shape
    for name, tensor in (("tokens", tokens), ("parents", parents), ("node_tokens", node_tokens)):
        expect_shape(name, tensor, (batch, width))
        expect_dense(name, tensor, 1)
    out = empty_walks(batch, max_path, tokens.device) if out is None else out
    return accept_walk_unchecked(tokens, parents, node_tokens, out)


def accept_walk_unchecked(tokens: Tensor, parents: Tensor, node_tokens: Tensor, out: Walks) -> Walks:
    """The hot path of `accept_walk`: one launch, no check, no allocation, no synchronisation."""
    batch, width = tokens.shape
    _accept_walk_kernel[(batch,)](
        tokens,
        parents,
        node_tokens,
        *out,
        tokens.stride(0),
        parents.stride(0),
        node_tokens.stride(0),
        width,
        P=out.path.shape[1],
        BQ=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out
