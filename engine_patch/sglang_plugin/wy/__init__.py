"""State option `wy`: trees verified from the committed state alone, without a copy of it for every node.

A verify pass reads the recurrent layers' committed states, solves for the whole tree at once
(`ddtree_kernels.tree_gdn`) and writes down only what went into each layer: q, k and v before the convolution
with the gate projections a and b. The commit replays the accepted path from that, as plain decoding would.
"""
