"""Trees of bfloat16 inputs in one launch, from what each node writes into the state.

With K, Q the nodes' keys and queries, S0 the request's state and A, P as in `ddtree_kernels.tree_gdn.triton`,

    R = diag(beta) (V - diag(exp G) K S0)        U = (I + A)^-1 R        O = diag(exp G) Q S0 + P U

Row i of U is what node i writes along its key: beta_i times the distance of v_i from what its parent's state
holds at k_i. So it is bounded by the state, however correlated keys are. No [Q, K] block of floats is formed:
keys and queries meet the state as they are stored.

(I + A)^-1 starts from its diagonal blocks of 16 rows, T. With N = T (A less these blocks), nilpotent,

    (I + A)^-1 = (I + N)^-1 T = (I + N^2) (I - N) T

K is a power of two, V a multiple of a program's value channels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.tree_gdn.fused_kernel import _path_sums, _words
from ddtree_kernels.tree_gdn.wy_kernels import _decay, _diagonal_blocks, _gates


@triton.jit
def _halves(x):
    """x in two bfloat16 parts, together to 2^-16.

    The first is cut off and not rounded: that takes no conversion, and registers are scarce.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _dot_halves(x_high, x_low, y_high, y_low):
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def _dot_state(x, state):
    """x @ state^T, exact in x, for a state as stored."""
    if state.dtype == tl.bfloat16:
        product = tl.dot(x, tl.trans(state))
    else:
        high, low = _halves(tl.trans(state))
        product = tl.dot(x, high, tl.dot(x, low))
    return product


@triton.jit
def _inverses_by_rows(A, BQ: tl.constexpr):
    """The inverses of I + A's diagonal blocks of 16 rows, 0 elsewhere.

    A finished row is taken from all later ones, so that a round is one product of rank 1 and needs no sum.
    """
    BLOCKS: tl.constexpr = BQ // 16
    diagonal, same = _diagonal_blocks(A, BQ)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    T = tl.where(row == column, 1.0, 0.0) + tl.zeros((BLOCKS, 16, 16), tl.float32)
    for j in tl.static_range(0, 15):
        factors = tl.sum(tl.where(column == j, diagonal, 0.0), axis=2)
        finished = tl.sum(tl.where(row == j, T, 0.0), axis=1)
        T -= factors[:, :, None] * finished[:, None, :]
    return tl.reshape(tl.where(same, T[:, :, None, :], 0.0), (BQ, BQ))


@triton.jit
def _solved(A, X_high, X_low, Y, BQ: tl.constexpr, T_high, T_low):
    """(I + A)^-1 X from Y = T X, T's parts given; X and Y are blocks of any width."""
    if BQ > 16:
        part = tl.arange(0, BQ) // 16
        A_high, A_low = _halves(tl.where(part[:, None] != part[None, :], A, 0.0))
        N_high, N_low = _halves(_dot_halves(T_high, T_low, A_high, A_low))
        Y_high, Y_low = _halves(Y)
        Y -= _dot_halves(N_high, N_low, Y_high, Y_low)
        if BQ == 64:
            # (I + N)^-1 = (I + N^2)(I - N): N couples four blocks.
            N_high, N_low = _halves(_dot_halves(N_high, N_low, N_high, N_low))
            Y_high, Y_low = _halves(Y)
            Y += _dot_halves(N_high, N_low, Y_high, Y_low)
    return Y


@triton.jit
def _inverse_norms(products, BQ: tl.constexpr):
    """1 / |x_i| from x x^T."""
    rows = tl.arange(0, BQ)
    squares = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), axis=1)
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def _stacked(k, q, Q, stride_k, stride_q, K: tl.constexpr, BQ: tl.constexpr):
    """[2 BQ, K]: keys, then queries."""
    channels = tl.arange(0, K)
    place = tl.arange(0, 2 * BQ)
    node = place % BQ
    at = tl.where(
        (place < BQ)[:, None],
        k + node[:, None] * stride_k + channels[None, :],
        q + node[:, None] * stride_q + channels[None, :],
    )
    return tl.load(at, mask=(node < Q)[:, None], other=0.0)


@triton.jit
def _upper_and_lower(x, BQ: tl.constexpr, N: tl.constexpr):
    """The halves of x [2 BQ, N]."""
    return tl.split(tl.permute(tl.reshape(x, (2, BQ, N)), (1, 2, 0)))


@triton.jit
def _left_and_right(x, BQ: tl.constexpr):
    """The halves of x [BQ, 2 BQ]."""
    return tl.split(tl.permute(tl.reshape(x, (BQ, 2, BQ)), (0, 2, 1)))


@triton.jit
def _tree_gdn_writes_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, bits, o, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, WORDS: tl.constexpr,
    BV: tl.constexpr, PTXAS: tl.constexpr,
):  # fmt: skip
    """All nodes of a head and BV of its value channels, for few heads: the shortest way to an output.

    PTXAS names the assembler where it matters, so that no cache gives back what another one made.
    """
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    rows = tl.arange(0, BQ)
    valid = rows < Q
    q += request * stride_qn + (head // GROUP) * K
    k += request * stride_kn + (head // GROUP) * K
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    v += request * stride_vn + head * V
    # Everything is asked for before anything is used.
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    raw_a = tl.load(a + request * stride_an + head + rows * stride_aq, mask=valid, other=0.0)
    raw_b = tl.load(b + request * stride_bn + head + rows * stride_bq, mask=valid, other=0.0)
    loaded_first, loaded_second = _words(bits + request * Q * WORDS, rows, Q, WORDS, BQ)
    channels = tl.arange(0, K)
    # A request without a slot forms no address below the pool.
    pool += tl.maximum(slot, 0) * stride_slot + head.to(tl.int64) * K * V
    STACKED: tl.constexpr = BQ == 16
    if STACKED:
        written = tl.load(v + rows[:, None] * stride_vq + values[None, :], mask=valid[:, None], other=0.0)
        both = _stacked(k, q, Q, stride_kq, stride_qq, K, BQ)
        state = tl.load(pool + values[:, None] * K + channels[None, :], mask=slot >= 0, other=0.0)
    else:
        keys = tl.load(k + rows[:, None] * stride_kq + channels[None, :], mask=valid[:, None], other=0.0)
        queries = tl.load(q + rows[:, None] * stride_qq + channels[None, :], mask=valid[:, None], other=0.0)
        written = tl.load(v + rows[:, None] * stride_vq + values[None, :], mask=valid[:, None], other=0.0)
        state = tl.load(pool + values[:, None] * K + channels[None, :], mask=slot >= 0, other=0.0)
        # These need no gate: warp groups work on them while the gates are done.
        A = tl.dot(keys, tl.trans(keys))
        P = tl.dot(queries, tl.trans(keys))
        QQ = tl.dot(queries, tl.trans(queries))
        R = _dot_state(keys, state)
        out = _dot_state(queries, state)

    beta = tl.zeros((BQ,), tl.float32)
    exact = tl.zeros((BQ,), tl.float32)
    rest = tl.zeros((BQ,), tl.float32)
    first = tl.zeros((BQ,), tl.int32)
    second = first
    # A loop of one round: without it the compiler does the gates again in every layout they are used in.
    for _ in range(1 + (Q >> 16)):
        first = loaded_first
        second = loaded_second
        beta, exact, rest = _gates(raw_a, raw_b, -tl.exp(rate), bias, valid)
    exact, rest = _path_sums(first, second, exact, rest, BQ)
    word = tl.where((rows < 32)[None, :], first[:, None], second[:, None])
    decay = _decay(((word >> (rows % 32)[None, :]) & 1) != 0, exact, rest, exact, rest)
    if STACKED:
        of_keys, of_queries = _upper_and_lower(tl.dot(both, tl.trans(both)), BQ, 2 * BQ)
        A, _ = _left_and_right(of_keys, BQ)
        P, QQ = _left_and_right(of_queries, BQ)
    k_norm = _inverse_norms(A, BQ)
    q_norm = _inverse_norms(QQ, BQ) * scale
    if STACKED:
        R, out = _upper_and_lower(_dot_state(both, state), BQ, BV)
    A *= decay * (beta * k_norm)[:, None] * k_norm[None, :]
    A = tl.where(rows[:, None] > rows[None, :], A, 0.0)
    P *= decay * q_norm[:, None] * k_norm[None, :]
    from_prefix = tl.exp(exact + rest)
    R = beta[:, None] * (written.to(tl.float32) - (from_prefix * k_norm)[:, None] * R)
    out *= (from_prefix * q_norm)[:, None]
    T_high, T_low = _halves(_inverses_by_rows(A, BQ))
    R_high, R_low = _halves(R)
    U = _dot_halves(T_high, T_low, R_high, R_low)
    U = _solved(A, R_high, R_low, U, BQ, T_high, T_low)
    P_high, P_low = _halves(P)
    U_high, U_low = _halves(U)
    out += _dot_halves(P_high, P_low, U_high, U_low)
    o += request * stride_on + head * V
    tl.store(o + rows[:, None] * stride_oq + values[None, :], out.to(o.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _tree_gdn_tiles_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, bits, o, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, WORDS: tl.constexpr,
    BV: tl.constexpr, BT: tl.constexpr, PTXAS: tl.constexpr,
):  # fmt: skip
    """The same for many heads: O = exp(G) Q S0 + W R with W = P (I + A)^-1 once, BT of BV channels at a time.

    PTXAS as above.
    """
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    rows = tl.arange(0, BQ)
    valid = rows < Q
    a += request * stride_an + head
    b += request * stride_bn + head
    q += request * stride_qn + (head // GROUP) * K
    k += request * stride_kn + (head // GROUP) * K
    start = tl.program_id(0) * BV
    v += request * stride_vn + head * V + start
    o += request * stride_on + head * V + start
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    raw_a = tl.load(a + rows * stride_aq, mask=valid, other=0.0)
    raw_b = tl.load(b + rows * stride_bq, mask=valid, other=0.0)
    loaded_first, loaded_second = _words(bits + request * Q * WORDS, rows, Q, WORDS, BQ)
    channels = tl.arange(0, K)
    keys = tl.load(k + rows[:, None] * stride_kq + channels[None, :], mask=valid[:, None], other=0.0)
    queries = tl.load(q + rows[:, None] * stride_qq + channels[None, :], mask=valid[:, None], other=0.0)
    columns = tl.arange(0, BT)
    # A request without a slot forms no address below the pool.
    pool += tl.maximum(slot, 0) * stride_slot + head.to(tl.int64) * K * V + start * K
    places = pool + columns[:, None] * K + channels[None, :]
    inside = (columns[:, None] < BT) & (slot >= 0)
    state = tl.load(places, mask=inside, other=0.0)

    beta = tl.zeros((BQ,), tl.float32)
    exact = tl.zeros((BQ,), tl.float32)
    rest = tl.zeros((BQ,), tl.float32)
    first = tl.zeros((BQ,), tl.int32)
    second = first
    # A loop of one round, as above.
    for _ in range(1 + (Q >> 16)):
        first = loaded_first
        second = loaded_second
        beta, exact, rest = _gates(raw_a, raw_b, -tl.exp(rate), bias, valid)
    exact, rest = _path_sums(first, second, exact, rest, BQ)
    word = tl.where((rows < 32)[None, :], first[:, None], second[:, None])
    decay = _decay(((word >> (rows % 32)[None, :]) & 1) != 0, exact, rest, exact, rest)
    A = tl.dot(keys, tl.trans(keys))
    k_norm = _inverse_norms(A, BQ)
    A *= decay * (beta * k_norm)[:, None] * k_norm[None, :]
    A = tl.where(rows[:, None] > rows[None, :], A, 0.0)
    W = _inverses_by_rows(A, BQ)
    W_high, W_low = _halves(W)
    W = _solved(A, W_high, W_low, W, BQ, W_high, W_low)
    W_high, W_low = _halves(W)
    P = tl.dot(queries, tl.trans(keys))
    q_norm = _inverse_norms(tl.dot(queries, tl.trans(queries)), BQ) * scale
    P *= decay * q_norm[:, None] * k_norm[None, :]
    P_high, P_low = _halves(P)
    W_high, W_low = _halves(_dot_halves(P_high, P_low, W_high, W_low))
    from_prefix = tl.exp(exact + rest)
    k_norm *= from_prefix
    q_norm *= from_prefix
    for tile in range(0, BV, BT):
        written = tl.load(
            v + tile + rows[:, None] * stride_vq + columns[None, :], mask=valid[:, None], other=0.0
        )
        if state.dtype == tl.bfloat16:
            kept = tl.dot(keys, tl.trans(state))
            out = tl.dot(queries, tl.trans(state))
        else:
            S_high, S_low = _halves(state)
            kept = tl.dot(keys, tl.trans(S_high), tl.dot(keys, tl.trans(S_low)))
            out = tl.dot(queries, tl.trans(S_high), tl.dot(queries, tl.trans(S_low)))
        # The next tile's state is on its way while this one's outputs are worked out.
        places += BT * K
        state = tl.load(places, mask=inside & (tile + BT < BV), other=0.0)
        R_high, R_low = _halves(beta[:, None] * (written.to(tl.float32) - k_norm[:, None] * kept))
        out = _dot_halves(W_high, W_low, R_high, R_low) + out * q_norm[:, None]
        at = o + tile + rows[:, None] * stride_oq + columns[None, :]
        tl.store(at, out.to(o.dtype.element_ty), mask=valid[:, None])
