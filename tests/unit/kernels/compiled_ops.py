"""Every operation once, compiled for a card, against its reference.

Run by test_addresses in a process of its own, because Triton decides once per process whether it interprets.

    python compiled_ops.py ARCH [OPERATION ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ptx_machine
import torch
from ddtree_kernels import bench_inputs
from ddtree_kernels.ancestry import ancestor_bits_naive, depth_first_naive

SHAPE = bench_inputs.Shape(layers=2, heads=1, value_heads=2, key_dim=64, value_dim=48, block=8)


def relative(found, expected):
    assert not found.isnan().any(), "an element was never written"
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def inputs_of(width):
    inputs = bench_inputs.random_inputs(SHAPE, 2, width, torch.device("cpu"))
    inputs.slots[1] = -1
    return inputs


def verify(width, inputs=None, **options):
    from ddtree_kernels.tree_gdn.naive import tree_gdn_verify_naive
    from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

    inputs = inputs_of(width) if inputs is None else inputs
    a, b, A_log, dt_bias, q, k, v, pool, slots = inputs.verify_args(0)
    wide = (t.double() for t in (a, b, A_log, dt_bias, q, k, v, pool))
    expected = tree_gdn_verify_naive(*wide, slots, inputs.parents)
    out = torch.full(v.shape, torch.nan)
    bits = ancestor_bits_naive(inputs.parents)
    tree_gdn_verify(*inputs.verify_args(0), inputs.parents, bits=bits, out=out, **options)
    return relative(out, expected)


def adversarial(width):
    """A chain of keys that hardly differ, strong writes, next to no decay: squaring fails on it."""
    parents = torch.arange(width)[None] - 1
    inputs = bench_inputs.adversarial_inputs(SHAPE, parents, 0.99, 0.98, -1e-3, torch.device("cpu"))
    return verify(width, inputs)


def writes(width, heads):
    """The kernels for bfloat16 inputs at K = V = 128, as so many heads take them."""
    from ddtree_kernels.tree_gdn.triton import writes_config

    shape = bench_inputs.Shape(layers=1, heads=1, value_heads=1, key_dim=128, value_dim=128, block=8)
    inputs = bench_inputs.random_inputs(shape, 1, width, torch.device("cpu"))
    return verify(width, inputs, config=writes_config(width, heads))


def cancelling():
    """A large state that queries and keys do not meet: tf32 would be wrong in the second digit."""
    inputs = bench_inputs.random_inputs(SHAPE, 1, 66, torch.device("cpu"), layers=1)
    channels = SHAPE.heads * SHAPE.key_dim
    # Keys and queries of a few directions only, and a state across them.
    few = torch.randn(4, channels, generator=torch.Generator().manual_seed(0))
    for part in (slice(0, channels), slice(channels, 2 * channels)):
        inputs.x[..., part] = (inputs.x[..., part][..., :4].float() @ few).to(inputs.x.dtype)
    q, k, _ = (t.double() for t in inputs.qkv(0))
    basis = torch.linalg.svd(torch.cat([q[0, :, 0], k[0, :, 0]]))[2][:8].T
    across = inputs.state_pool.double()
    across = across - (across @ basis) @ basis.T
    inputs.state_pool.copy_(200 * across)
    return verify(66, inputs)


def conv():
    from ddtree_kernels.tree_conv import tree_conv_naive
    from ddtree_kernels.tree_conv.triton import tree_conv

    inputs = inputs_of(11)
    arguments = (inputs.x[0], inputs.conv_pool[0], inputs.slots, inputs.weight[0], None, inputs.parents)
    return relative(tree_conv(*arguments), tree_conv_naive(*arguments))


def commit():
    from ddtree_kernels.commit import commit_naive
    from ddtree_kernels.commit.triton import commit as commit_all

    inputs = inputs_of(7)
    path, counts = torch.arange(5).expand(2, 5).contiguous(), torch.tensor([5, 2])
    track = {"track_counts": torch.tensor([2, -1]), "track_slots": torch.tensor([0, -1])}
    conv_pool, state_pool = inputs.conv_pool.clone(), inputs.state_pool.clone()
    stacked = (inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight)
    for layer in range(SHAPE.layers):
        commit_naive(
            *(t[layer] for t in stacked), None, conv_pool[layer], state_pool[layer], inputs.slots, path,
            counts, key_heads=1, **track,
        )  # fmt: skip
    commit_all(
        *stacked, None, inputs.conv_pool, inputs.state_pool, inputs.slots, path, counts, key_heads=1, **track
    )
    assert torch.equal(conv_pool, inputs.conv_pool)
    return relative(inputs.state_pool, state_pool)


def build_walk():
    from ddtree_kernels.accept_walk import accept_walk_naive
    from ddtree_kernels.accept_walk.triton import accept_walk
    from ddtree_kernels.tree_build.triton import tree_build

    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(2, 7, 6, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.arange(6).expand(2, 7, 6).contiguous()
    trees = tree_build(torch.ones(2, dtype=torch.int64), ids, logprobs, 12, torch.ones(2, dtype=torch.int64))
    assert torch.equal(trees.bits, ancestor_bits_naive(trees.parents))
    expected = accept_walk_naive(trees.tokens, trees.parents, trees.tokens, 8)
    found = accept_walk(trees.tokens, trees.parents, trees.tokens, 8)
    return 0.0 if all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)) else 1.0


def ancestry():
    from ddtree_kernels.ancestry.triton import ancestor_bits, depth_first

    parents = bench_inputs.random_parents(2, 37, 7)
    bits = ancestor_bits(parents)
    assert torch.equal(bits, ancestor_bits_naive(parents))
    walk = depth_first(parents, bits)
    return float(any(not torch.equal(x, y) for x, y in zip(walk, depth_first_naive(parents), strict=True)))


OPERATIONS = {
    "verify": lambda: verify(5),
    "verify-two-warps": lambda: verify(30),
    "verify-four-warps": lambda: verify(40),
    "verify-wide": lambda: verify(70),
    "verify-writes": lambda: writes(13, 48),
    "verify-writes-four-warps": lambda: writes(61, 48),
    "verify-tiles": lambda: writes(13, 192),
    "verify-scan": lambda: verify(9, form="scan"),
    "adversarial": lambda: adversarial(70),
    "adversarial-four-warps": lambda: adversarial(64),
    "cancelling": cancelling,
    "conv": conv,
    "commit": commit,
    "build-walk": build_walk,
    "ancestry": ancestry,
}


def main() -> None:
    ptx_machine.install(int(sys.argv[1]))
    for name in sys.argv[2:] or OPERATIONS:
        print(json.dumps({name: OPERATIONS[name]()}), flush=True)


if __name__ == "__main__":
    main()
