"""Dots of small whole numbers as sm_90 computes them, with warp-group products, against numpy.

Run by test_warp_group_products in a process of its own, because Triton decides once per process whether it
interprets. Prints a line of JSON per dot: its name, how many elements differ, and which products it used.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ptx_machine
import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(
    x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DOUBLED: tl.constexpr,
    X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr,
):  # fmt: skip
    """out = x @ y; doubled: 2 x @ y, so that x comes from registers. Turned: stored with the other order."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if X_TURNED:
        left = tl.trans(tl.load(x + k[:, None] * M + m[None, :]))
    else:
        left = tl.load(x + m[:, None] * K + k[None, :])
    if Y_TURNED:
        right = tl.trans(tl.load(y + n[:, None] * K + k[None, :]))
    else:
        right = tl.load(y + k[:, None] * N + n[None, :])
    product = tl.dot(left, right)
    if DOUBLED:
        product += tl.dot((left.to(tl.float32) * 2.0).to(left.dtype), right)
    tl.store(out + m[:, None] * N + n[None, :], product)


def main() -> None:
    ptx_machine.install(90)
    texts = []
    launch = ptx_machine.launch
    ptx_machine.launch = lambda ptx, *rest: (texts.append(ptx), launch(ptx, *rest))
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64, 64, 4), (64, 32, 16, 4), (64, 16, 32, 4), (128, 128, 64, 8)]
    for M, N, K, warps in shapes:
        for doubled, x_turned, y_turned in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)):
            x = torch.randint(-9, 10, (M, K), generator=generator)
            y = torch.randint(-9, 10, (K, N), generator=generator)
            out = torch.full((M, N), torch.nan)
            stored = [(x.T if x_turned else x), (y.T if y_turned else y)]
            stored = [t.to(torch.bfloat16).contiguous() for t in stored]
            dot_kernel[(1,)](*stored, out, M, N, K, doubled, x_turned, y_turned, num_warps=warps)
            expected = (1 + 2 * doubled) * (x @ y)
            products = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\{|%rd)", texts[-1])
            print(
                json.dumps(
                    {
                        "name": f"{M}x{N}x{K} doubled {doubled} turned {x_turned}{y_turned}",
                        "wrong": int((out != expected).sum()),
                        "left": sorted({"registers" if p == "{" else "shared" for p in products}),
                    }
                )
            )


if __name__ == "__main__":
    main()
