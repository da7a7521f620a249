"""Draft trees built from candidate tables on the GPU. The reference is `ddtree_engine.tree.build_tree`."""
