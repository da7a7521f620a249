"""The benchmark's measurements of the verify kernels: speed, error, adversarial keys, configurations."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from ddtree_kernels.bench_inputs import (
    Inputs,
    adversarial_inputs,
    captured_inputs,
    random_inputs,
    random_parents,
)
from ddtree_kernels.bench_timing import Place, relative_error, timed
from torch import Tensor


def verify(place: Place, batch: int, width: int, config: Any = None) -> dict[str, Any]:
    """All layers' verify in the WY form; the error of one layer's float32 result."""
    from ddtree_kernels.ancestry.triton import ancestor_bits
    from ddtree_kernels.tree_gdn import triton as gdn

    shape, batch, width = place.shape, place.batches(batch), place.widths(width)
    inputs = random_inputs(shape, batch, width, place.device)
    bits = ancestor_bits(inputs.parents)
    out = torch.empty_like(inputs.qkv(0)[2].contiguous())
    config = config or gdn.config_of(
        width,
        shape.key_dim,
        shape.value_dim,
        out.element_size(),
        heads=batch * shape.value_heads,
        device=place.device,
        dtype=out.dtype,
    )
    scratch = gdn.verify_scratch(out, shape.key_dim)
    scale = shape.key_dim**-0.5
    error = verify_error(inputs, config=config)  # first: it checks the configuration

    def work() -> None:
        for layer in range(shape.layers):
            gdn.tree_gdn_verify_unchecked(*inputs.verify_args(layer), bits, out, scratch, scale, config)

    found = timed(place, work)
    return found | {
        "floor_bytes": batch * shape.state_bytes,
        "error": error,
        "config": asdict(config),
    }


def scan(place: Place, batch: int, width: int, block_v: int = 16, num_warps: int = 2) -> dict[str, Any]:
    """All layers' verify in the scan form."""
    from ddtree_kernels.ancestry.triton import ancestor_bits, depth_first
    from ddtree_kernels.tree_gdn import triton as gdn

    shape, batch, width = place.shape, place.batches(batch), place.widths(width)
    inputs = random_inputs(shape, batch, width, place.device)
    walk = depth_first(inputs.parents, ancestor_bits(inputs.parents))
    out = torch.empty_like(inputs.qkv(0)[2].contiguous())
    states = gdn.scan_scratch(out, shape.key_dim)
    scale = shape.key_dim**-0.5

    def work() -> None:
        for layer in range(shape.layers):
            gdn.tree_gdn_scan_unchecked(
                *inputs.verify_args(layer), walk, out, states, scale, block_v, num_warps
            )

    found = timed(place, work)
    return found | {"floor_bytes": batch * shape.state_bytes, "error": verify_error(inputs, form="scan")}


def forms(place: Place) -> dict[str, Any]:
    """WY against scan by N and Q: the rows of the dispatcher's table."""
    rows = []
    for batch, width in product((1,) if place.tiny else (1, 4, 8), (8,) if place.tiny else (8, 16, 32)):
        times = {
            "wy": verify(place, batch, width)["milliseconds"],
            "scan": scan(place, batch, width)["milliseconds"],
        }
        faster = min(times, key=lambda form: times[form])
        rows.append({"batch": batch, "width": width, "form": faster, "milliseconds": times})
    return {"rows": rows}


def verify_error(inputs: Inputs, **options: Any) -> float:
    """RMS error of layer 0's float32 output against the float64 recurrence."""
    from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

    expected = exact_outputs(inputs)
    out = torch.full(expected.shape, torch.nan, dtype=torch.float32, device=expected.device)
    tree_gdn_verify(*inputs.verify_args(0), inputs.parents, out=out, **options)
    return relative_error(out, expected)


def exact_outputs(inputs: Inputs) -> Tensor:
    """The float64 recurrence of layer 0."""
    from ddtree_kernels.tree_gdn.naive import tree_gdn_verify_naive

    a, b, A_log, dt_bias, q, k, v, pool, slots = inputs.verify_args(0)
    gates = a.double(), b.double(), A_log.double(), dt_bias.double()
    heads = q.double(), k.double(), v.double(), pool.double()
    return tree_gdn_verify_naive(*gates, *heads, slots, inputs.parents)


def adversarial(place: Place) -> dict[str, Any]:
    """Correlated keys, strong writes, weak to strong decay, deep trees and chains, the pair's own keys."""
    shape, width = place.shape, place.widths(64)
    trees = {
        f"tree{width // 2}": random_parents(1, width // 2, shape.block - 1),
        f"chain{width // 2}": torch.arange(width // 2)[None] - 1,
        f"tree{width}": random_parents(1, width, shape.block - 1),
        f"chain{width}": torch.arange(width)[None] - 1,
        f"chain{2 * width}": torch.arange(2 * width)[None] - 1,
    }
    grid = list(product((0.5, 0.9, 0.99), (0.9, 0.98), (-0.001, -0.1, -1.0, -20.0)))
    if place.tiny:
        grid, trees = [(0.99, 0.98, -0.001)], {f"chain{width}": trees[f"chain{width}"]}
    rows: list[dict[str, Any]] = []

    def measure(inputs: Inputs, **labels: Any) -> None:
        rows.append(labels | {"error": verify_error(inputs)})

    for label, parents in trees.items():
        for cosine, beta, decay in grid:
            inputs = adversarial_inputs(shape, parents.to(place.device), cosine, beta, decay, place.device)
            measure(inputs, tree=label, cosine=cosine, beta=beta, decay=decay)
    if not place.tiny:
        for label, inputs in captured_inputs(place.device):
            measure(inputs, tree=f"pair {label}")
    # NaN counts as worst: max() alone would pass it over.
    worst = max(rows, key=lambda row: row["error"] if row["error"] == row["error"] else float("inf"))
    return {"figure": worst["error"], "error": worst["error"], "worst": worst, "rows": rows}


def sweep(place: Place, batch: int, width: int = 64) -> dict[str, Any]:
    """Other launch configurations of the three launches, for choosing the shipped ones."""
    from ddtree_kernels.tree_gdn.triton import VerifyConfig

    rows: list[dict[str, Any]] = []
    changes: tuple[dict[str, Any], ...] = (
        {}, {"block_v": 64}, {"block_v": 16}, {"block_k": 32}, {"block_k": 128}, {"num_warps": 8},
        {"num_stages": 3}, {"solve_warps": 8}, {"solve_warps": 2},
    )  # fmt: skip
    for change in changes:
        config = replace(VerifyConfig(), **change)
        try:
            row = verify(place, batch, width, config=config)
        except Exception as error:  # a configuration too large for the card
            row = {"config": asdict(config), "failed": f"{type(error).__name__}: {str(error)[:200]}"}
        rows.append(row)
    return {"rows": rows}
