"""The drafter with its caches against a dense one written from the definition."""

from __future__ import annotations

import pytest
import torch
from ddtree_engine.reference.cache import DrafterCache
from ddtree_engine.reference.config import read_target_config
from ddtree_engine.reference.drafter import Drafter
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

from tests.support.tiny_pair import BLOCK, HIDDEN


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rope(x, positions, theta=1e7):
    """x [T, heads, dim], rotating halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def dense(weights, config, features, block):
    """One block of F embeddings after T committed tokens; layer by layer, no cache."""
    committed, width = len(features), len(block)
    context = norm(linear(features, weights["fc.weight"]), weights["hidden_norm.weight"])
    positions = torch.arange(committed + width, dtype=torch.float32)
    x = block
    for index, kind in enumerate(config.layer_types):

        def at(name, index=index):
            return weights[f"layers.{index}.{name}.weight"]

        normed = norm(x, at("input_layernorm"))
        both = torch.cat([context, normed])
        q = rope(
            norm(linear(normed, at("self_attn.q_proj")).unflatten(1, (2, 16)), at("self_attn.q_norm")),
            positions[committed:],
        )
        k = norm(linear(both, at("self_attn.k_proj")).unflatten(1, (1, 16)), at("self_attn.k_norm"))
        k = rope(k, positions)[:, 0]
        v = linear(both, at("self_attn.v_proj"))
        distance = positions[committed:, None] - positions[None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if kind == "sliding_attention":
            seen = (distance >= 0) & (distance < config.window)
        scores = torch.einsum("qhd,kd->hqk", q, k) / 4
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + linear(mixed.transpose(0, 1).flatten(1), at("self_attn.o_proj"))
        normed = norm(x, at("post_attention_layernorm"))
        gated = silu(linear(normed, at("mlp.gate_proj"))) * linear(normed, at("mlp.up_proj"))
        x = x + linear(gated, at("mlp.down_proj"))
    return norm(x, weights["norm.weight"])


@pytest.mark.parametrize("chunks", [[12], [5, 7], [1] * 12, [3]])
@torch.inference_mode()
def test_a_cached_block_equals_a_dense_one(tiny, chunks):
    torch.manual_seed(1)
    target = read_target_config(tiny / "target")
    drafter = Drafter.load(tiny / "drafter", target, torch.float32, 64)
    features, block = torch.randn(sum(chunks), 3 * HIDDEN), torch.randn(BLOCK, HIDDEN)
    cache = DrafterCache.empty(drafter.config, 4, torch.float32)
    for chunk in features.split(chunks):
        drafter.extend(chunk, cache)
    expected = dense(load_file(tiny / "drafter" / "model.safetensors"), drafter.config, features, block)
    torch.testing.assert_close(drafter.hidden(block, cache), expected, rtol=1e-4, atol=1e-5)
    # A second block must not see the first one's scratch rows.
    torch.testing.assert_close(drafter.hidden(block, cache), expected, rtol=1e-4, atol=1e-5)
