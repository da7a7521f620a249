"""The WY form of trees of up to 64 nodes in one launch: a program solves a tree and streams value channels.

M, q' and the output are those of `ddtree_kernels.tree_gdn.triton`, in registers instead of scratch memory.
(I + A)^-1 starts from its diagonal blocks of 16 rows, T, by substitution. With N = T (A less these blocks),
which couples blocks and is nilpotent by at most four of them,

    (I + A)^-1 = (I + N)^-1 T = (I + N^2) (I - N) T

Every factor is an inverse of a diagonal block or a bounded sum of its products; the only power is N^2.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.tree_gdn.products import dot, dot_stored
from ddtree_kernels.tree_gdn.wy_kernels import _block_inverses, _decay, _gate_rows, _products, _rows


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
    T = _block_inverses(A, BQ)
    if BQ > 16:
        part = tl.arange(0, BQ) // 16
        N = dot(T, tl.where(part[:, None] != part[None, :], A, 0.0), PRECISION)
        T -= dot(N, T, PRECISION)
        if BQ == 64:
            # (I + N)^-1 = (I + N^2)(I - N): N couples four blocks.
            T += dot(dot(N, N, PRECISION), T, PRECISION)
    return T


@triton.jit
def _tree_gdn_fused_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, bits, o, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KC: tl.constexpr, BK: tl.constexpr,
    BQ: tl.constexpr, WORDS: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    PTXAS: tl.constexpr,
):  # fmt: skip
    """All nodes of a head and BV of its value channels.

    PTXAS names the assembler where it matters, so that no cache gives back what another one made.
    """
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    # A request without a slot forms no address below the pool.
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
