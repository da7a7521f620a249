"""The kernels of the WY form of trees of more than 32 nodes: invert diagonal blocks, respond, stream.

Rows go in blocks of 32, so that every product's operands stay in registers on any card and a wider
tree means more programs instead of larger ones. With T_J the inverse of diagonal block J of I + L and P as in
the derivation, a block row I of M follows from right to left:

    M_IJ = (P_IJ - sum over J < B <= I of M_IB L_BJ) T_J          (M includes beta from here on)
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.tree_gdn.products import dot, dot_inputs, dot_stored

# exp(-1000) is 0 in float32; the bound keeps the exact part of a path's log decay exact.
LEAST_LOG_DECAY = tl.constexpr(-1000.0)
# Rows of `facts`: what a block needs to know of every node of an earlier one.
FACTS = tl.constexpr(4)


@triton.jit
def _gate_rows(a, b, rate, bias, rows, Q, stride_a, stride_b):
    """Write strength and log decay (its exact and its remaining part) of these rows; padding has neither."""
    valid = rows < Q
    raw_a = tl.load(a + rows * stride_a, mask=valid, other=0.0)
    raw_b = tl.load(b + rows * stride_b, mask=valid, other=0.0)
    return _gates(raw_a, raw_b, rate, bias, valid)


@triton.jit
def _gates(a, b, rate, bias, valid):
    """The same from rows that are loaded; `valid` says which are nodes."""
    x = a.to(tl.float32) + bias
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    g = tl.maximum(tl.where(valid, rate * softplus, 0.0), LEAST_LOG_DECAY)
    exact = tl.floor(g * 128.0) * 0.0078125
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    return tl.where(valid, beta, 0.0), exact, g - exact


@triton.jit
def _seen(bits, rows, block, Q, WORDS: tl.constexpr, BQ: tl.constexpr):
    """[rows, BQ]: is a node of this block the row's ancestor or itself. A block never crosses a word."""
    first = block * BQ
    word = tl.load(bits + rows * WORDS + first // 32, mask=rows < Q, other=0)
    columns = first % 32 + tl.arange(0, BQ)
    return ((word[:, None] >> columns[None, :]) & 1) != 0


@triton.jit
def _rows(x, rows, columns, Q, K, stride):
    """x[rows, columns] as stored, zero beyond Q and K."""
    mask = (rows[:, None] < Q) & (columns[None, :] < K)
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _decay(seen, exact_to, rest_to, exact_from, rest_from):
    """Decay from every column's node to every row's, 0 where it is not seen (exp of -inf)."""
    log_decay = (exact_to[:, None] - exact_from[None, :]) + (rest_to[:, None] - rest_from[None, :])
    return tl.exp(tl.where(seen, log_decay, float("-inf")))


@triton.jit
def _products(
    x, x_rows, stride_x, y, y_rows, stride_y, Q,
    K: tl.constexpr, KC: tl.constexpr, BQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_i . y_j of two sets of rows, and the inverse norm of every x_i."""
    product = tl.zeros((BQ, BQ), tl.float32)
    square = tl.zeros((BQ,), tl.float32)
    for start in range(0, K, KC):
        channels = start + tl.arange(0, KC)
        left = _rows(x, x_rows, channels, Q, K, stride_x)
        right = _rows(y, y_rows, channels, Q, K, stride_y)
        product += dot_inputs(left, tl.trans(right), PRECISION)
        wide = left.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
    return product, 1.0 / tl.sqrt(square + 1e-6)


@triton.jit
def _diagonal_blocks(L, BQ: tl.constexpr):
    """L's diagonal blocks [BLOCKS, 16, 16], and where they are in [BLOCKS, 16, BLOCKS, 16]."""
    BLOCKS: tl.constexpr = BQ // 16
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(L, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2), same


@triton.jit
def _block_inverses(L, BQ: tl.constexpr):
    """The inverses of I + L's diagonal blocks of 16 rows, 0 elsewhere; L as in `_unit_lower_inverse`."""
    BLOCKS: tl.constexpr = BQ // 16
    diagonal, same = _diagonal_blocks(L, BQ)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros((BLOCKS, 16, 16), tl.float32)
    for i in tl.range(1, 16, loop_unroll_factor=1, disable_licm=True):
        factors = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
        update = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == i, inverse - update[:, None, :], inverse)
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (BQ, BQ))


@triton.jit
def _unit_lower_inverse(L, BQ: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for strictly lower triangular L [BQ, BQ]: by substitution in 16 rows, then doubling."""
    T = _block_inverses(L, BQ)
    if BQ == 32:
        half = tl.arange(0, BQ) // 16
        step = dot(tl.where(half[:, None] != half[None, :], L, 0.0), T, PRECISION)
        T -= dot(T, step, PRECISION)
    return T


@triton.jit
def _invert_block(
    a, b, k, bits, rate, bias, block, Q, stride_aq, stride_bq, stride_kq,
    K: tl.constexpr, KC: tl.constexpr, BQ: tl.constexpr, WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One diagonal block: gates, log decays summed over whole paths, the keys' inverse norms, (I + L)^-1."""
    own = block * BQ + tl.arange(0, BQ)
    beta, exact, rest = _gate_rows(a, b, rate, bias, own, Q, stride_aq, stride_bq)
    seen = _seen(bits, own, block, Q, WORDS, BQ)
    exact_sum = tl.sum(tl.where(seen, exact[None, :], 0.0), axis=1)
    rest_sum = tl.sum(tl.where(seen, rest[None, :], 0.0), axis=1)
    L, norm = _products(k, own, stride_kq, k, own, stride_kq, Q, K, KC, BQ, PRECISION)
    L *= (beta * norm)[:, None] * norm[None, :]
    L *= _decay(seen, exact_sum, rest_sum, exact_sum, rest_sum)
    T = _unit_lower_inverse(tl.where(own[:, None] > own[None, :], L, 0.0), BQ, PRECISION)
    for before in range(block):
        columns = before * BQ + tl.arange(0, BQ)
        _, exact, rest = _gate_rows(a, b, rate, bias, columns, Q, stride_aq, stride_bq)
        seen = _seen(bits, own, before, Q, WORDS, BQ)
        exact_sum += tl.sum(tl.where(seen, exact[None, :], 0.0), axis=1)
        rest_sum += tl.sum(tl.where(seen, rest[None, :], 0.0), axis=1)
    return beta, exact_sum, rest_sum, norm, T


@triton.jit
def _tree_gdn_invert_kernel(
    a, b, A_log, dt_bias, k, bits, inverses, facts, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_kn, stride_kq,
    GROUP: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, BQ: tl.constexpr, BLOCKS: tl.constexpr,
    WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All diagonal blocks at once: T and the facts go to scratch memory."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    beta, exact_sum, rest_sum, norm, T = _invert_block(
        a + request * stride_an + head, b + request * stride_bn + head,
        k + request * stride_kn + (head // GROUP) * K, bits + request * Q * WORDS, rate, bias, block,
        Q, stride_aq, stride_bq, stride_kq, K, KC, BQ, WORDS, PRECISION,
    )  # fmt: skip
    rows = tl.arange(0, BQ)
    place = request * tl.num_programs(0) + head
    tl.store(inverses + ((place * BLOCKS + block) * BQ + rows[:, None]) * BQ + rows[None, :], T)
    facts += place * FACTS * BLOCKS * BQ + block * BQ + rows
    tl.store(facts, beta)
    tl.store(facts + BLOCKS * BQ, exact_sum)
    tl.store(facts + 2 * BLOCKS * BQ, rest_sum)
    tl.store(facts + 3 * BLOCKS * BQ, norm)


@triton.jit
def _facts(facts, block, BLOCKS: tl.constexpr, BQ: tl.constexpr):
    """Write strength, both parts of the log decay from the prefix, and the key's inverse norm of a block."""
    at = facts + block * BQ + tl.arange(0, BQ)
    return (
        tl.load(at),
        tl.load(at + BLOCKS * BQ),
        tl.load(at + 2 * BLOCKS * BQ),
        tl.load(at + 3 * BLOCKS * BQ),
    )


@triton.jit
def _tree_gdn_respond_kernel(
    q, k, bits, inverses, facts, responses, prefix_queries, scale, Q,
    stride_qn, stride_qq, stride_kn, stride_kq,
    GROUP: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, BQ: tl.constexpr, BLOCKS: tl.constexpr,
    WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M and q' of one block of rows. M's blocks right of the diagonal are never written or read."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    q += request * stride_qn + (head // GROUP) * K
    k += request * stride_kn + (head // GROUP) * K
    bits += request * Q * WORDS
    place = request * tl.num_programs(0) + head
    facts += place * FACTS * BLOCKS * BQ
    inverses += place * BLOCKS * BQ * BQ
    rows = tl.arange(0, BQ)
    own = block * BQ + rows
    valid = own[:, None] < Q
    responses += (place * Q + own[:, None]) * (BLOCKS * BQ)
    _, exact_own, rest_own, _ = _facts(facts, block, BLOCKS, BQ)
    query_norm = tl.zeros((BQ,), tl.float32)
    M = tl.zeros((BQ, BQ), tl.float32)
    for back in range(block + 1):
        column = block - back
        columns = column * BQ + rows
        beta, exact, rest, norm = _facts(facts, column, BLOCKS, BQ)
        T = tl.load(inverses + columns[:, None] * BQ + rows[None, :])
        R, query_norm = _products(
            q, own, stride_qq, k, columns, stride_kq, Q, K, KC, BQ, PRECISION
        )  # fmt: skip
        query_norm *= scale
        R *= query_norm[:, None]
        R *= _decay(_seen(bits, own, column, Q, WORDS, BQ), exact_own, rest_own, exact, rest)
        for between in range(column + 1, block + 1):
            nodes = between * BQ + rows
            _, exact_to, rest_to, _ = _facts(facts, between, BLOCKS, BQ)
            L, norm_to = _products(
                k, nodes, stride_kq, k, columns, stride_kq, Q, K, KC, BQ, PRECISION
            )  # fmt: skip
            L *= norm_to[:, None]
            L *= _decay(_seen(bits, nodes, column, Q, WORDS, BQ), exact_to, rest_to, exact, rest)
            M_between = tl.load(responses + nodes[None, :], mask=valid, other=0.0)
            R -= dot(M_between, L, PRECISION)
        M = dot(R * norm[None, :], T, PRECISION) * beta[None, :]
        tl.store(responses + columns[None, :], M, mask=valid)
        tl.debug_barrier()  # the next rounds and the loop below read what this block has stored of M
    prefix_queries += (place * Q + own[:, None]) * K
    from_prefix = tl.exp(exact_own + rest_own) * query_norm
    for start in range(0, K, KC):
        channels = start + tl.arange(0, KC)
        prefix_query = _rows(q, own, channels, Q, K, stride_qq).to(tl.float32) * from_prefix[:, None]
        for column in range(block + 1):
            columns = column * BQ + rows
            M = tl.load(responses + columns[None, :], mask=valid, other=0.0)
            _, exact, rest, norm = _facts(facts, column, BLOCKS, BQ)
            keys = _rows(k, columns, channels, Q, K, stride_kq)
            prefix_query -= dot_stored(M * (tl.exp(exact + rest) * norm)[None, :], keys, PRECISION)
        tl.store(prefix_queries + channels[None, :], prefix_query, mask=valid & (channels < K)[None, :])


@triton.jit
def _tree_gdn_stream_kernel(
    v, pool, slots, o, responses, prefix_queries, Q,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BLOCKS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = M v + q' S0 for one block of rows and one tile of value channels."""
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    request = (tl.program_id(2) // BLOCKS).to(tl.int64)
    block = tl.program_id(2) % BLOCKS
    rows = tl.arange(0, BQ)
    own = block * BQ + rows
    valid = own[:, None] < Q
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    # A request without a slot forms no address below the pool.
    pool += tl.maximum(slot, 0) * stride_slot + head.to(tl.int64) * K * V
    v += request * stride_vn + head * V
    place = (request * HV + head) * Q + own[:, None]
    out = tl.zeros((BQ, BV), tl.float32)
    for column in range(block + 1):
        nodes = column * BQ + rows
        M = tl.load(responses + place * (BLOCKS * BQ) + nodes[None, :], mask=valid, other=0.0)
        out += dot_stored(M, _rows(v, nodes, values, Q, V, stride_vq), PRECISION)
    for start in range(0, K, BK):
        channels = start + tl.arange(0, BK)
        inside = (channels < K)[None, :]
        query = tl.load(prefix_queries + place * K + channels[None, :], mask=valid & inside, other=0.0)
        mask = (values[:, None] < V) & inside & (slot >= 0)
        state = tl.load(pool + values[:, None] * K + channels[None, :], mask=mask, other=0.0)
        out += dot_stored(query, tl.trans(state), PRECISION)
    o += request * stride_on + head * V
    mask = valid & (values[None, :] < V)
    tl.store(o + own[:, None] * stride_oq + values[None, :], out.to(o.dtype.element_ty), mask=mask)
