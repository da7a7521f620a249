import numpy as np
from ddtree_engine.tree import ancestor_mask, samples


def test_random_trees_are_trees_of_the_asked_depth():
    rng = np.random.default_rng(0)
    for width, depth in ((4, 4), (16, 5), (64, 16), (8, 16)):
        parents, depths = samples.random_tree(rng, width, depth)
        assert (parents[1:] < np.arange(1, width)).all()
        assert (depths < depth).all()
        assert all(depths[node] == depths[parents[node]] + 1 for node in range(1, width))
        leaves = samples.leaves_of(parents, 4)
        assert not set(leaves) & set(parents.tolist())
        assert samples.path_of(parents, leaves[0])[0] == 0


def test_a_tree_of_samples_serves_as_a_tree():
    parents, depths = samples.random_tree(np.random.default_rng(1), 16, 5)
    tree = samples.tree_with(np.arange(16), parents, depths)
    leaf = samples.leaves_of(parents, 1)[0]
    assert ancestor_mask(tree)[leaf].nonzero()[0].tolist() == samples.path_of(parents, leaf)
