"""A bed of a 27B's cost: the small trained pair, embedded exactly in models of Qwen3.6-27B's shape.

`shapes` has the sizes, `places` says which layer, head, channel and row of the small pair goes where,
`embed` makes the wide checkpoints' tensors one by one, `folders` writes what a server is pointed at,
`sglang_models` loads it. The math is in docs/27b-bed.md.
"""
