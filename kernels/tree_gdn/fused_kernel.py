"""The WY form of trees of up to 32 nodes in one launch: a program solves a tree and streams value channels.

M, q' and the output are those of `ddtree_kernels.tree_gdn.triton`, in registers instead of scratch memory.
T is built from the diagonal outwards: with T_s the inverse of the diagonal blocks of s rows and A_s the part
of A that couples the two halves of each block of 2 s rows,

    T_2s = T_s - T_s A_s T_s            T_1 = I

Every factor is an inverse of a diagonal block or a part of A, hence bounded; no power of A is formed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.tree_gdn.products import dot, dot_stored
from ddtree_kernels.tree_gdn.wy_kernels import _decay, _gate_rows, _products, _rows, _seen


@triton.jit
def _doubled_inverse(A, BQ: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [BQ, BQ], BQ = 2^LEVELS, by doubling diagonal blocks."""
    row = tl.arange(0, BQ)[:, None]
    column = tl.arange(0, BQ)[None, :]
    # Blocks that are inverted already, and A where it is still needed: they do not overlap.
    X = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -A, A))
    for level in tl.range(1, LEVELS, loop_unroll_factor=1, disable_licm=True):
        done = row >> level == column >> level
        coupling = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        T = tl.where(done, X, 0.0)
        step = dot(T, dot(tl.where(coupling, X, 0.0), T, PRECISION), PRECISION)
        X = tl.where(coupling, -step, X)
    return X


@triton.jit
def _tree_gdn_fused_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, bits, o, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KC: tl.constexpr, BK: tl.constexpr,
    BQ: tl.constexpr, LEVELS: tl.constexpr, WORDS: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All nodes of a head and BV of its value channels."""
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

    beta, exact, rest = _gate_rows(a, b, rate, bias, rows, Q, stride_aq, stride_bq)
    seen = _seen(bits + request * Q * WORDS, rows, 0, Q, WORDS, BQ)
    exact = tl.sum(tl.where(seen, exact[None, :], 0.0), axis=1)
    rest = tl.sum(tl.where(seen, rest[None, :], 0.0), axis=1)
    decay = _decay(seen, exact, rest, exact, rest)
    A, k_norm = _products(k, rows, stride_kq, k, rows, stride_kq, Q, K, KC, BQ, PRECISION)
    A *= decay * (beta * k_norm)[:, None] * k_norm[None, :]
    T = _doubled_inverse(tl.where(rows[:, None] > rows[None, :], A, 0.0), BQ, LEVELS, PRECISION)
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
