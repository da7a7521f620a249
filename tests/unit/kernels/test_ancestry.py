from __future__ import annotations

import pytest
import torch
from ddtree_kernels.ancestry import ancestor_mask, chain_parents, depths, window_index

from .cases import SHAPES, parents_of, path_to


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 2, 13])
def test_mask_and_depths_follow_the_parents(shape, width):
    parents = parents_of(shape, 3, width, seed=width)
    mask, depth = ancestor_mask(parents), depths(parents)
    for n in range(3):
        for node in range(width):
            path = path_to(parents[n], node)
            assert torch.where(mask[n, node])[0].tolist() == sorted(path)
            assert depth[n, node] == len(path) - 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [2, 4])
def test_windows_run_through_the_ancestors_into_the_carried_inputs(shape, window):
    parents = parents_of(shape, 2, 9)
    index = window_index(parents, window)
    for n in range(2):
        for node in range(9):
            history = [*range(window - 1), *(row + window - 1 for row in path_to(parents[n], node))]
            assert index[n, node].tolist() == history[-window:]


def test_a_root_whose_parent_is_unset_is_still_the_root():
    unset = chain_parents(1, 5)
    unset[0, 0] = 0
    assert torch.equal(ancestor_mask(unset), ancestor_mask(chain_parents(1, 5)))
    assert torch.equal(window_index(unset, 4), window_index(chain_parents(1, 5), 4))
