#!/usr/bin/env python3
"""Verify of up to 64 nodes in one launch, which is not shipped: is it right on this card, and how fast?

    python3 tools/gpu/one_launch.py --out "$OUT" [--budget-s 240]

At 64 rows the kernel multiplies with Hopper's wgmma, and ptxas 12.8 gave some launch configurations of it
wrong operand descriptors (docs/kernels.md). So every configuration is compiled with Triton's own ptxas and
with newer ones that are found, each in a process of its own, and its result is held against a float64
recurrence. What is right with the newest is then timed beside the shipped kernels, 48 layers in a CUDA graph.
Writes `one_launch.json` into `--out` after every row. Needs torch and triton.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import kernels_plan

    kernels_plan.use_checkout()

import torch
import triton
import triton.language as tl
from ddtree_kernels.tree_gdn.products import dot, dot_stored
from ddtree_kernels.tree_gdn.wy_kernels import _decay, _gate_rows, _products, _rows

# Most that may be off: bfloat16 products in three parts reach 1e-5.
RIGHT = 1e-4
WIDTHS, BATCHES = (16, 32, 64), (1, 4, 8)
WORKERS = 12
OWN, NEWER = "triton's", ("ptxas-blackwell", "cuda")


@triton.jit
def _words(bits, rows, Q, WORDS: tl.constexpr, BQ: tl.constexpr):
    """The rows' ancestors as one or two words of 32 bits."""
    first = tl.load(bits + rows * WORDS, mask=rows < Q, other=0)
    second = first
    if BQ == 64:
        second = tl.load(bits + rows * WORDS + 1, mask=(rows < Q) & (WORDS > 1), other=0)
    return first, second


@triton.jit
def _path_sums(first, second, exact, rest, BQ: tl.constexpr):
    """Log decays summed over every row's path, in both parts: down the ancestors, which stays in a thread."""
    ancestor = tl.arange(0, BQ)
    word = tl.where((ancestor < 32)[:, None], first[None, :], second[None, :])
    seen = ((word >> (ancestor % 32)[:, None]) & 1) != 0
    return (
        tl.sum(tl.where(seen, exact[:, None], 0.0), axis=0),
        tl.sum(tl.where(seen, rest[:, None], 0.0), axis=0),
    )


@triton.jit
def _inverse(A, BQ: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [BQ, BQ]: substitution in 16 rows, then bounded products."""
    BLOCKS: tl.constexpr = BQ // 16
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(A, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros((BLOCKS, 16, 16), tl.float32)
    for i in tl.range(1, 16, loop_unroll_factor=1, disable_licm=True):
        factors = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
        update = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == i, inverse - update[:, None, :], inverse)
    T = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (BQ, BQ))
    if BQ > 16:
        part = tl.arange(0, BQ) // 16
        N = dot(T, tl.where(part[:, None] != part[None, :], A, 0.0), PRECISION)
        T -= dot(N, T, PRECISION)
        if BQ == 64:
            # (I + N)^-1 = (I + N^2)(I - N): N couples four blocks.
            T += dot(dot(N, N, PRECISION), T, PRECISION)
    return T


@triton.jit
def _one_launch_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, bits, o, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KC: tl.constexpr, BK: tl.constexpr,
    BQ: tl.constexpr, WORDS: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All nodes of a head and BV of its value channels; the math is `ddtree_kernels.tree_gdn.triton`'s."""
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    pool += tl.maximum(slot, 0) * stride_slot + head.to(tl.int64) * K * V
    a += request * stride_an + head
    b += request * stride_bn + head
    q += request * stride_qn + (head // GROUP) * K
    k += request * stride_kn + (head // GROUP) * K
    v += request * stride_vn + head * V
    o += request * stride_on + head * V
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    rows = tl.arange(0, BQ)
    beta = tl.zeros((BQ,), tl.float32)
    exact = tl.zeros((BQ,), tl.float32)
    rest = tl.zeros((BQ,), tl.float32)
    # A loop of one round: without it the compiler does the gates again in every layout they are used in.
    for _ in range(1 + (Q >> 16)):
        beta, exact, rest = _gate_rows(a, b, rate, bias, rows, Q, stride_aq, stride_bq)
    first, second = _words(bits + request * Q * WORDS, rows, Q, WORDS, BQ)
    exact, rest = _path_sums(first, second, exact, rest, BQ)
    word = tl.where((rows < 32)[None, :], first[:, None], second[:, None])
    decay = _decay(((word >> (rows % 32)[None, :]) & 1) != 0, exact, rest, exact, rest)
    A, k_norm = _products(k, rows, stride_kq, k, rows, stride_kq, Q, K, KC, BQ, PRECISION)
    A *= decay * (beta * k_norm)[:, None] * k_norm[None, :]
    T = _inverse(tl.where(rows[:, None] > rows[None, :], A, 0.0), BQ, PRECISION)
    P, q_norm = _products(q, rows, stride_qq, k, rows, stride_kq, Q, K, KC, BQ, PRECISION)
    q_norm *= scale
    P *= decay * q_norm[:, None] * k_norm[None, :]
    M = dot(P, T, PRECISION) * beta[None, :]

    values = tl.program_id(0) * BV + tl.arange(0, BV)
    out = dot_stored(M, _rows(v, rows, values, Q, V, stride_vq), PRECISION)
    from_prefix = tl.exp(exact + rest)
    M *= (from_prefix * k_norm)[None, :]
    q_norm *= from_prefix
    for start in range(0, K, BK):
        channels = start + tl.arange(0, BK)
        inside = (values[:, None] < V) & (channels < K)[None, :] & (slot >= 0)
        state = tl.load(pool + values[:, None] * K + channels[None, :], mask=inside, other=0.0)
        query = _rows(q, rows, channels, Q, K, stride_qq).to(tl.float32) * q_norm[:, None]
        query -= dot_stored(M, _rows(k, rows, channels, Q, K, stride_kq), PRECISION)
        out += dot_stored(query, tl.trans(state), PRECISION)
    mask = (rows < Q)[:, None] & (values < V)[None, :]
    tl.store(o + rows[:, None] * stride_oq + values[None, :], out.to(o.dtype.element_ty), mask=mask)


def verify(inputs: tuple[Any, ...], bits: Any, out: Any, config: tuple[int, int, int, int]) -> None:
    """Outputs [N, Q <= 64, HV, V] into `out`; `inputs` as `bench_inputs.Inputs.verify_args`, `bits` of
    `ancestor_bits`; config is (value channels, state's key channels, others' key channels, warps)."""
    a, b, A_log, dt_bias, q, k, v, pool, slots = inputs
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    block_v, block_k, chunk, num_warps = config
    strides = [stride for x in (a, b, q, k, v) for stride in x.stride()[:2]]
    _one_launch_kernel[(triton.cdiv(value_dim, block_v), heads, batch)](
        *(a, b, A_log, dt_bias, q, k, v, pool, slots, bits, out, key_dim**-0.5, width),
        *strides,
        *(pool.stride(0), out.stride(0), out.stride(1), slots.stride(0)),
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        KC=chunk,
        BK=block_k,
        BQ=16 if width <= 16 else 32 if width <= 32 else 64,
        WORDS=bits.shape[2],
        BV=block_v,
        PRECISION="bf16x3",
        num_warps=num_warps,
        num_stages=1,
    )


def configurations() -> list[tuple[int, tuple[int, int, int, int]]]:
    """(width, configuration) of everything that is tried."""
    wide = product((32, 64, 128), (32, 64), (32, 64), (4, 8))
    middle = product((32, 64, 128), (32, 64), (64,), (2,))
    small = product((16, 32, 64), (32, 64, 128), (64,), (1,))
    return [(64, c) for c in wide] + [(32, c) for c in middle] + [(16, c) for c in small]


def toolchains() -> dict[str, str]:
    """Name -> path of ptxas; the empty path is Triton's own choice."""
    found = {OWN: ""}
    places = (
        Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell",
        Path("/usr/local/cuda/bin/ptxas"),
    )
    return found | {name: str(path) for name, path in zip(NEWER, places, strict=True) if path.is_file()}


def error_of(width: int, config: tuple[int, int, int, int], device: Any, shape: Any, batch: int = 2) -> float:
    """Relative error of the float32 result against a float64 recurrence; NaN where nothing was written."""
    from ddtree_kernels.ancestry import ancestor_bits_naive
    from ddtree_kernels.bench_inputs import random_inputs
    from ddtree_kernels.bench_timing import relative_error
    from ddtree_kernels.bench_verify import exact_outputs

    inputs = random_inputs(shape, batch, width, device, layers=1)
    expected = exact_outputs(inputs)
    out = torch.full(expected.shape, torch.nan, dtype=torch.float32, device=device)
    verify(inputs.verify_args(0), ancestor_bits_naive(inputs.parents), out, config)
    return relative_error(out, expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "one-launch")), help="where the JSON goes")
    add("--budget-s", type=float, default=240, help="seconds for everything")
    add("--check", nargs=5, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        from ddtree_kernels.bench_inputs import QWEN36_27B

        width, *config = options.check
        # A whole tree and one that leaves rows empty.
        widths = (width, width - width // 3)
        errors = [error_of(w, tuple(config), torch.device("cuda"), QWEN36_27B) for w in widths]
        print(json.dumps(errors))
        return 0
    return measure(options.out, options.budget_s)


def measure(out: Path, budget: float) -> int:
    """Check everything side by side, then time what is right; 0 if some configuration of each width is."""
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"schema": 1, "toolchains": toolchains(), "checks": [], "times": []}

    def note(part: str, row: dict[str, Any]) -> None:
        report[part].append(row)
        (out / "one_launch.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    # Below 64 rows there is no wgmma.
    jobs = [
        (name, width, config)
        for name, path in toolchains().items()
        for width, config in configurations()
        if not path or width == 64
    ]
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(WORKERS) as pool:
        for row in pool.map(lambda job: check(*job, Path(caches)), jobs):
            note("checks", row)
            print(json.dumps(row), flush=True)
    newest = next(name for name in (*NEWER, OWN) if name in toolchains())
    report["timed_with"] = newest
    if newest != OWN:
        os.environ["TRITON_PTXAS_PATH"] = toolchains()[newest]
    right = {
        (row["width"], tuple(row["config"]))
        for row in report["checks"]
        if row["right"] and row["ptxas"] == (newest if row["width"] == 64 else OWN)
    }
    for row in times(sorted(right), lambda: budget - (time.perf_counter() - started)):
        note("times", row)
    fastest = {}
    for width, batch in product(WIDTHS, BATCHES):
        rows = [r for r in report["times"] if (r["width"], r["batch"]) == (width, batch)]
        ours = [r for r in rows if r["config"]]
        if ours:
            best = min(ours, key=lambda r: r["milliseconds"])
            shipped = next(r["milliseconds"] for r in rows if not r["config"])
            fastest[f"q{width} n{batch}"] = [best["config"], best["milliseconds"], shipped]
    print("configuration, milliseconds, the shipped kernels' milliseconds:", json.dumps(fastest, indent=1))
    return 0 if {width for width, _ in right} == set(WIDTHS) else 1


def check(ptxas: str, width: int, config: tuple[int, ...], caches: Path) -> dict[str, Any]:
    """One configuration with one ptxas in a process of its own: a fault costs that one alone."""
    path = toolchains()[ptxas]
    cache = caches / ptxas.replace("'", "")
    environment = dict(
        os.environ, TRITON_CACHE_DIR=str(cache), **({"TRITON_PTXAS_PATH": path} if path else {})
    )
    command = [sys.executable, __file__, "--check", str(width), *map(str, config)]
    row = {"ptxas": ptxas, "width": width, "config": config, "right": False}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return row | {"why": "time used up"}
    if done.returncode:
        return row | {"why": done.stderr.strip()[-300:]}
    errors = json.loads(done.stdout.splitlines()[-1])
    # NaN is not below anything.
    return row | {"errors": errors, "right": all(error < RIGHT for error in errors)}


def times(right: list[tuple[int, tuple[int, ...]]], left: Any) -> Any:
    """Milliseconds of 48 layers: the shipped kernels (config None), then every right configuration."""
    from ddtree_kernels.ancestry.triton import ancestor_bits
    from ddtree_kernels.bench_inputs import QWEN36_27B, random_inputs
    from ddtree_kernels.bench_timing import Place, timed
    from ddtree_kernels.tree_gdn import triton as gdn

    place = Place(QWEN36_27B, torch.device("cuda"))
    shape = place.shape
    for batch, width in product(BATCHES, WIDTHS):
        inputs = random_inputs(shape, batch, width, place.device)
        bits = ancestor_bits(inputs.parents)
        out = torch.empty_like(inputs.qkv(0)[2].contiguous())
        scratch = gdn.verify_scratch(out, shape.key_dim)

        def shipped(inputs=inputs, bits=bits, out=out, scratch=scratch, width=width) -> None:
            config = gdn.config_of(width, shape.key_dim, shape.value_dim, exact=True)
            scale = shape.key_dim**-0.5
            for layer in range(shape.layers):
                gdn.tree_gdn_verify_unchecked(*inputs.verify_args(layer), bits, out, scratch, scale, config)

        def ours(config, inputs=inputs, bits=bits, out=out) -> None:
            for layer in range(shape.layers):
                verify(inputs.verify_args(layer), bits, out, config)

        yield {"batch": batch, "width": width, "config": None, **timed(place, shipped)}
        for config in (c for w, c in right if w == width):
            if left() < 10:
                return
            yield {"batch": batch, "width": width, "config": config, **timed(place, lambda c=config: ours(c))}


if __name__ == "__main__":
    sys.exit(main())
