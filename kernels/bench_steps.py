"""The benchmark's other measurements: numerics, convolution, build and walk, memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from ddtree_kernels.bench_commit import commit_error
from ddtree_kernels.bench_inputs import Inputs, random_inputs
from ddtree_kernels.bench_timing import Place, relative_error, timed
from ddtree_kernels.bench_verify import verify_error
from torch import Tensor

MIB = 2**20


def numerics(place: Place) -> dict[str, Any]:
    """Fresh random inputs through every kernel once, against the references, on the card itself."""
    from ddtree_kernels.ancestry import ancestor_bits_naive
    from ddtree_kernels.ancestry.triton import ancestor_bits
    from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

    errors: dict[str, float] = {}
    forms: dict[str, dict[str, Any]] = {"": {}, "-scan": {"form": "scan"}}
    for batch, nodes in ((2, 5),) if place.tiny else ((1, 5), (2, 32), (2, 64), (1, 128)):
        inputs = random_inputs(place.shape, batch, nodes, place.device, layers=1, seed=nodes)
        if not torch.equal(ancestor_bits(inputs.parents), ancestor_bits_naive(inputs.parents)):
            raise AssertionError(f"ancestor bits differ at Q={nodes}")
        for label, options in forms.items():
            name = f"verify-n{batch}-q{nodes}{label}"
            errors[name] = verify_error(inputs, **options)
            once, again = (
                tree_gdn_verify(*inputs.verify_args(0), inputs.parents, **options) for _ in range(2)
            )
            errors[f"{name}-repeat"] = float((once.float() - again.float()).abs().max())
        errors[f"conv-n{batch}-q{nodes}"] = conv_error(inputs)
    errors["commit"] = commit_error(place)
    errors["build"] = build_difference(place)
    return {"errors": errors}


def conv_error(inputs: Inputs) -> float:
    """Error of layer 0's convolution, rounded to bfloat16 as it is used."""
    from ddtree_kernels.tree_conv.naive import tree_conv_naive
    from ddtree_kernels.tree_conv.triton import tree_conv

    x, pool, weight = inputs.x[0], inputs.conv_pool[0], inputs.weight[0]
    found = tree_conv(x, pool, inputs.slots, weight, None, inputs.parents)
    wide = x.double(), pool.double(), inputs.slots, weight.double()
    return relative_error(found, tree_conv_naive(*wide, None, inputs.parents))


def build_difference(place: Place) -> float:
    """1.0 unless the card's tree has parents first, descending scores and right ancestor bits."""
    from ddtree_kernels.ancestry import ancestor_bits_naive
    from ddtree_kernels.tree_build.triton import tree_build

    width = place.widths(64)
    roots, ids, logprobs, prefix = _candidates(place, 2)
    trees = tree_build(roots, ids, logprobs, width, prefix)
    rows = torch.arange(width, device=place.device)
    right = bool((trees.parents < rows).all() and (trees.scores.diff(dim=1) <= 0).all())
    return 0.0 if right and torch.equal(trees.bits, ancestor_bits_naive(trees.parents)) else 1.0


def _candidates(place: Place, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Roots, ids, sorted log-probabilities [N, F-1, 16] and prefix lengths."""
    generator = torch.Generator(device=place.device).manual_seed(0)
    size = (batch, place.shape.block - 1, 16)
    raw = torch.randn(size, generator=generator, device=place.device) * 2
    logprobs = raw.log_softmax(-1).sort(-1, descending=True).values
    ids = torch.arange(16, device=place.device).expand(size).contiguous()
    zeros = torch.zeros(batch, dtype=torch.int64, device=place.device)
    return zeros, ids, logprobs, zeros + 100


def conv(place: Place) -> dict[str, Any]:
    """All layers' tree convolution for one request; the first call's time with its compilation."""
    from ddtree_kernels.tree_conv.triton import tree_conv_unchecked

    shape = place.shape
    inputs = random_inputs(shape, 1, place.widths(64), place.device)
    out = torch.empty_like(inputs.x[0])

    def work() -> None:
        for layer in range(shape.layers):
            tree_conv_unchecked(
                inputs.x[layer], inputs.conv_pool[layer], inputs.slots, inputs.weight[layer], None,
                inputs.parents, True, out,
            )  # fmt: skip

    start = time.perf_counter()
    work()
    if place.on_card:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    read = inputs.x.numel() * 2 + inputs.conv_pool[:, :1].numel() * 2 + inputs.weight.numel() * 2
    return timed(place, work) | {
        "first_call_seconds": first,
        "floor_bytes": read + inputs.x.numel() * 2,
        "error": conv_error(inputs),
    }


def build_walk(place: Place) -> dict[str, Any]:
    """Tree build and accept walk of a batch, one graph of both."""
    from ddtree_kernels.accept_walk.triton import accept_walk_unchecked, empty_walks
    from ddtree_kernels.tree_build.triton import empty_trees, tree_build_unchecked

    batch, width = place.batches(8), place.widths(64)
    roots, ids, logprobs, prefix = _candidates(place, batch)
    trees = empty_trees(batch, width, place.device)
    walks = empty_walks(batch, place.shape.block, place.device)
    choices = torch.zeros(batch, width, dtype=torch.int64, device=place.device)

    def work() -> None:
        tree_build_unchecked(roots, ids, logprobs, prefix, "best-first", None, None, trees)
        accept_walk_unchecked(trees.tokens, trees.parents, choices, walks)

    found = timed(place, work)
    return found | {"figure": found["milliseconds"] * 1e3}


def memory(place: Place) -> dict[str, Any]:
    """What one request's verify keeps until its commit, and the scratch of verify and commit."""
    from ddtree_kernels.commit.triton import commit_facts
    from ddtree_kernels.tree_gdn.triton import verify_scratch

    shape, width = place.shape, 64
    stash = shape.layers * width * (shape.channels + 2 * shape.value_heads) * 2
    like = torch.empty(1, width, shape.value_heads, shape.value_dim, device="meta")
    scratch = sum(buffer.nbytes for buffer in verify_scratch(like, shape.key_dim))
    kept = torch.empty(shape.layers, 1, width, shape.channels, device="meta")
    path = torch.empty(1, shape.block, device="meta")
    scratch += commit_facts(kept, path, shape.value_heads).nbytes
    return {
        "figure": (stash + scratch) / MIB,
        "stash_mib": stash / MIB,
        "scratch_mib": scratch / MIB,
        "stock_mib": width * shape.state_bytes / MIB,
    }
