from __future__ import annotations

import pytest
import torch
from ddtree_engine.tree import tree_of, walk
from ddtree_kernels.accept_walk import accept_walk_naive
from ddtree_kernels.accept_walk.triton import accept_walk
from ddtree_kernels.errors import KernelInputError

from .cases import SHAPES, parents_of


def inputs(shape, width, batch=3, seed=0):
    """Three tokens only, so that walks go deep and siblings repeat."""
    generator = torch.Generator().manual_seed(seed)
    tokens, choices = torch.randint(0, 3, (2, batch, width), generator=generator)
    return tokens, parents_of(shape, batch, width, seed), choices


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 8, 64])
def test_walks_equal_the_numpy_walk(shape, width):
    for seed in range(4):
        tokens, parents, choices = inputs(shape, width, seed=seed)
        found = accept_walk(tokens, parents.int(), choices, 20)
        for a, b in zip(found, accept_walk_naive(tokens, parents, choices, 20), strict=True):
            assert torch.equal(a, b)
        for n in range(3):
            zeros = [0] * width
            tree = tree_of(tokens[n].tolist(), parents[n].tolist(), zeros, zeros, zeros)
            accepted = walk(tree, choices[n].numpy())
            path = accepted.path[:20]
            assert found.path[n].tolist() == [*path, *[-1] * (20 - len(path))]
            assert (found.counts[n], found.leaf[n]) == (len(path), path[-1])
            assert found.bonus[n] == choices[n, path[-1]]


def test_a_path_longer_than_its_buffer_is_cut_at_a_valid_bonus():
    tokens = torch.ones(1, 8, dtype=torch.int64)
    parents = parents_of("chain", 1, 8)
    for walked in (accept_walk, accept_walk_naive):
        path, counts, bonus, leaf = walked(tokens, parents, tokens, 3)
        assert path.tolist() == [[0, 1, 2]]
        assert (int(counts), int(bonus), int(leaf)) == (3, 1, 2)


def test_wrong_arguments_are_named():
    tokens, parents, choices = inputs("random", 8)
    for arguments, message in (
        ((tokens[0], parents, choices, 3), "tokens: found shape"),
        ((tokens, parents[:, 1:], choices, 3), "parents: found shape"),
        ((tokens, parents, choices, 0), "max_path: found 0"),
        ((tokens.T.contiguous().T, parents, choices, 3), "tokens: found strides"),
    ):
        with pytest.raises(KernelInputError, match=message):
            accept_walk(*arguments)
