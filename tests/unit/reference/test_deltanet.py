"""The in-place forms against `ddtree_kernels`' readable ones, and replay against plain decoding."""

from __future__ import annotations

import pytest
import torch
from ddtree_engine.reference.deltanet import (
    Heads,
    Weights,
    convolve_chain,
    convolve_tree,
    decode,
    read,
    replay,
    split_heads,
)
from ddtree_kernels.ancestry import window_index
from ddtree_kernels.commit import commit_naive
from ddtree_kernels.tree_conv import tree_conv_naive
from ddtree_kernels.tree_gdn import gates, gdn_step

HEADS = Heads(keys=2, values=6, key_dim=16, value_dim=8)
SLOT = torch.zeros(1, dtype=torch.int64)


@pytest.fixture
def layer():
    torch.manual_seed(3)
    channels = HEADS.channels
    return {
        "state": torch.randn(6, 8, 16),
        "window": torch.randn(3, channels),
        "qkv": torch.randn(9, channels),
        "a": torch.randn(9, 6),
        "b": torch.randn(9, 6),
        "weight": torch.randn(4, channels),
        "A_log": torch.randn(6),
        "dt_bias": torch.randn(6),
    }


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_convolution_follows_the_branches(layer, shape):
    parents = torch.arange(9) - 1 if shape == "chain" else torch.tensor([-1, 0, 0, 1, 1, 2, 4, 0, 6])
    expected = tree_conv_naive(
        layer["qkv"][None], layer["window"].T[None], SLOT, layer["weight"].T, None, parents[None]
    )[0]
    history = torch.cat([layer["window"], layer["qkv"]])
    found = convolve_tree(history, layer["weight"], window_index(parents[None], 4)[0].T)
    torch.testing.assert_close(found, expected)
    if shape == "chain":
        assert torch.equal(convolve_chain(history, layer["weight"]), found)


def test_step_is_the_kernels_step(layer):
    history = torch.cat([layer["window"], layer["qkv"][:1]])
    q, k, v = split_heads(convolve_chain(history, layer["weight"]), HEADS)
    g, beta = gates(layer["a"][:1], layer["b"][:1], layer["A_log"], layer["dt_bias"])
    q, k = (rows[0].repeat_interleave(3, dim=0) for rows in (q, k))
    expected, out = gdn_step(q, k, v[0], g[0], beta[0], layer["state"])
    query = decode(
        layer["state"], layer["window"], layer["qkv"][:1], layer["a"][:1], layer["b"][:1], own(layer), HEADS
    )
    torch.testing.assert_close(layer["state"], expected)
    torch.testing.assert_close(read(layer["state"], query), out)
    assert torch.equal(layer["window"], history[1:])


def test_replay_is_the_kernels_commit(layer):
    path = torch.tensor([0, 2, 5, 8])
    windows, states = layer["window"].T[None].clone(), layer["state"][None].clone()
    commit_naive(
        layer["qkv"][None],
        layer["a"][None],
        layer["b"][None],
        layer["A_log"],
        layer["dt_bias"],
        layer["weight"].T,
        None,
        windows,
        states,
        SLOT,
        path[None],
        torch.tensor([len(path)]),
        key_heads=HEADS.keys,
    )
    replay_rows(layer, path)
    torch.testing.assert_close(layer["state"], states[0])
    torch.testing.assert_close(layer["window"], windows[0].T)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_a_replayed_path_is_bit_for_bit_a_decoded_one(layer, length):
    """Decoding sees one token's rows within one projection's output; the stash has the whole tree's."""
    alone = {name: value.clone() for name, value in layer.items()}
    replay_rows(layer, torch.arange(length))
    for row in range(length):
        one = slice(row, row + 1)
        projected = torch.cat([alone["qkv"][one], alone["b"][one], alone["a"][one]], dim=1)
        qkv, b, a = torch.split(projected, [HEADS.channels, 6, 6], dim=1)
        decode(alone["state"], alone["window"], qkv, a, b, own(alone), HEADS)
    assert torch.equal(layer["state"], alone["state"])
    assert torch.equal(layer["window"], alone["window"])


def own(layer):
    return Weights(layer["weight"], layer["A_log"], layer["dt_bias"])


def replay_rows(layer, rows):
    stash = (layer[name][rows] for name in ("qkv", "a", "b"))
    replay(layer["state"], layer["window"], *stash, own(layer), HEADS)
