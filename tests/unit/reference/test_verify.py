"""Verifying a tree: every node is its own path, siblings don't leak, a commit is plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ddtree_engine.reference.shape import tree_shape, unsafe_shape
from ddtree_engine.tree import tree_of

from .conftest import make_request, random_prompt

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 8, 0, 4, 12, 13, 14]


@pytest.fixture
def prefilled(engines):
    """The target with 75 prompt tokens in its cache, a tree of 16 nodes and the layout's function."""
    engine = engines("ddtree")
    running = engine.start(make_request(random_prompt(75)))
    while running.in_prefill:
        engine.advance(running)
    return engine.target, running.target_cache


def some_tree(tokens=None):
    tokens = random_prompt(len(PARENTS), seed=9) if tokens is None else tokens
    depths = []
    for parent in PARENTS:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tree_of(tokens, PARENTS, depths, [0.0] * len(PARENTS), [0] * len(PARENTS))


@torch.inference_mode()
def verify(target, cache, tree, layout=tree_shape):
    result = target.verify(torch.from_numpy(tree.tokens), layout(tree, target.config.conv_kernel), cache)
    return target.logits(result.hidden), result


def path_to(node):
    path = [node]
    while PARENTS[path[-1]] >= 0:
        path.append(PARENTS[path[-1]])
    return path[::-1]


def snapshot(cache):
    return [tensor.clone() for tensor in (cache.states, cache.windows)], cache.length


def restore(cache, saved):
    (states, windows), cache.length = saved
    cache.states.copy_(states)
    cache.windows.copy_(windows)


def test_every_nodes_logits_are_those_of_its_path_alone(prefilled):
    target, cache = prefilled
    logits, _ = verify(target, cache, some_tree())
    tolerance = 1e-4 * (logits.max() - logits.min())
    tree, saved = some_tree(), snapshot(cache)
    for node in range(len(PARENTS)):
        restore(cache, saved)
        with torch.inference_mode():
            for token in tree.tokens[path_to(node)].tolist():
                alone = target.logits(target.step(token, cache).hidden)
        assert (alone[0] - logits[node]).abs().max() <= tolerance, f"node {node}"


@pytest.mark.parametrize(("layout", "leaks"), [(tree_shape, False), (unsafe_shape, True)])
def test_changing_a_branch_leaves_the_others_alone(prefilled, layout, leaks):
    target, cache = prefilled
    tokens = random_prompt(len(PARENTS), seed=9)
    before, _ = verify(target, cache, some_tree(tokens), layout)
    tokens[1] += 1  # node 1 and everything below it
    after, _ = verify(target, cache, some_tree(tokens), layout)
    changed = [1 in path_to(node) for node in range(len(PARENTS))]
    span = before.max() - before.min()
    moved = ((before - after).abs().amax(dim=1) > 1e-5 * span).tolist()
    assert all(moved[node] for node in range(len(PARENTS)) if changed[node])
    leaked = [node for node in range(len(PARENTS)) if moved[node] and not changed[node]]
    assert bool(leaked) == leaks


@pytest.mark.parametrize("leaf", [0, 7, 10, 15])
def test_commit_leaves_what_plain_decoding_of_the_path_leaves(prefilled, leaf):
    target, cache = prefilled
    tree, saved, path = some_tree(), snapshot(cache), torch.tensor(path_to(leaf))
    _, result = verify(target, cache, tree)
    with torch.inference_mode():
        target.commit(result.stash, path, path, cache)
    states, windows, length = cache.states.clone(), cache.windows.clone(), cache.length
    keys, values = (rows[:, :, :length].clone() for rows in (cache.keys, cache.values))
    restore(cache, saved)
    with torch.inference_mode():
        for token in tree.tokens[path.numpy()].tolist():
            target.step(token, cache)
    assert cache.length == length
    for found, expected in (
        (states, cache.states),
        (windows, cache.windows),
        (keys, cache.keys[:, :, :length]),
        (values, cache.values[:, :, :length]),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_verify_commits_nothing(prefilled):
    target, cache = prefilled
    saved, keys = snapshot(cache), cache.keys[:, :, : cache.length].clone()
    verify(target, cache, some_tree())
    assert torch.equal(cache.states, saved[0][0])
    assert torch.equal(cache.windows, saved[0][1])
    assert torch.equal(cache.keys[:, :, : cache.length], keys)
    assert cache.length == saved[1]


def test_verify_works_when_the_cache_must_grow(prefilled):
    target, cache = prefilled
    expected, _ = verify(target, cache, some_tree())
    cache.keys, cache.values = (rows[:, :, : cache.length].clone() for rows in (cache.keys, cache.values))
    found, _ = verify(target, cache, some_tree())
    assert torch.equal(found, expected)


def test_tree_positions_count_depth_not_rows(prefilled):
    shape = tree_shape(some_tree(), 4)
    assert shape.depths.tolist() == [len(path_to(node)) - 1 for node in range(len(PARENTS))]
    assert np.array_equal(shape.mask[0].sum(1).numpy(), shape.depths.numpy() + 1)
