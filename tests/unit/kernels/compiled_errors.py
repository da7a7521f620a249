"""Errors of the verify kernels as they are compiled for a card, on random, adversarial and captured inputs.

    python compiled_errors.py ARCH FILE

Minutes on a CPU; the tests run the same machine on a few of these. FILE is raw data of a table in the docs.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ptx_machine
import torch
from ddtree_kernels import bench_inputs
from ddtree_kernels.ancestry import ancestor_bits_naive
from ddtree_kernels.bench_timing import relative_error
from ddtree_kernels.bench_verify import exact_outputs

SHAPE = bench_inputs.Shape(layers=1, heads=1, value_heads=1, key_dim=128, value_dim=128)


def cases():
    """(label, inputs) of every row."""
    cpu = torch.device("cpu")
    for width in (64, 128):
        yield f"random, {width} nodes", bench_inputs.random_inputs(SHAPE, 1, width, cpu)
    trees = {
        "tree of 64": bench_inputs.random_parents(1, 64, 15),
        "chain of 64": torch.arange(64)[None] - 1,
        "chain of 128": torch.arange(128)[None] - 1,
    }
    for (label, parents), cosine, decay in product(trees.items(), (0.5, 0.9, 0.99), (-0.001, -1.0, -20.0)):
        inputs = bench_inputs.adversarial_inputs(SHAPE, parents, cosine, 0.98, decay, cpu)
        yield f"{label}, key cosine {cosine}, beta 0.98, log decay {decay}", inputs
    yield from bench_inputs.captured_inputs(cpu)


def row_of(label, inputs):
    from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

    expected, bits = exact_outputs(inputs), ancestor_bits_naive(inputs.parents)
    out = torch.full(expected.shape, torch.nan)
    tree_gdn_verify(*inputs.verify_args(0), inputs.parents, bits=bits, out=out)
    return {"inputs": label, "error": relative_error(out, expected)}


def main() -> None:
    arch, path = int(sys.argv[1]), Path(sys.argv[2])
    ptx_machine.install(arch)
    rows = []
    for label, inputs in cases():
        rows.append(row_of(label, inputs))
        print(json.dumps(rows[-1]), flush=True)
        report = {"schema": 1, "hardware": f"CPU, running the PTX compiled for sm_{arch}", "rows": rows}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
