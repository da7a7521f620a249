"""Gated delta rule over a tree on the GPU: the ancestor-mask WY form, one program per request and value head.

With L = strictly lower part of beta_i (k_i . k_j) D[i, j] and P = (q_i . k_j) D[i, j] on and below the
diagonal (`ddtree_kernels.tree_gdn.wy` has the derivation), a layer's output is linear in v and the state:

    M   = P (I + L)^-1 diag(beta)                 [Q, Q]
    q'  = exp(G_i) q_i - M diag(exp(G_j)) k_j     [Q, K]
    o   = M v + q' S0                             two products, streamed over tiles of V

so the solve happens once per request and head, not once per tile of V, and no state is written. (M is
stored by columns of whole blocks; the corner above the diagonal blocks carries the first block's inverse to
the second's launch.)

**Why it is stable.** M[i, j] is the response of node i to a unit write at node j, q'_i that of node i to the
prefix state: products of decays and of the contractions I - beta k k^T, so |M| <= beta and |q'_i| <= |q_i|,
however correlated the keys are. (I + L)^-1 has the same bound. It is built by forward substitution in blocks
of 16 rows, then by doubling, `T_2b = T_b - T_b L_off T_b`, whose factors are all inverses of diagonal blocks
and hence bounded too; no power of L is ever formed.

**Precision.** k and v enter products as they are stored: for 16-bit inputs `k k^T` and `q k^T` are exact
products summed in float32 and normalised afterwards, and the float32 factors M are split into two 16-bit
parts (relative rounding 2^-17). `solve_precision` and `state_precision` set the rest. Log decays are summed
as a multiple of 2^-7, exactly, and a remainder below 1, so that differences of large sums keep their digits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from ddtree_kernels.ancestry.triton import ancestor_bits
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from torch import Tensor

MAX_WIDTH = 128
MAX_HEAD_DIM = 256
# exp(-1000) is 0 in float32; the bound keeps the exact part of a path's log decay exact.
LEAST_LOG_DECAY = tl.constexpr(-1000.0)

Precision = Literal["tf32", "tf32x3", "bf16x3", "ieee"]


@triton.jit
def _dot(x, y, PRECISION: tl.constexpr):
    """x @ y of float32 blocks. bf16x3 is split here: left to the compiler it spills on sm_90."""
    if PRECISION == "bf16x3":
        x_high = x.to(tl.bfloat16)
        y_high = y.to(tl.bfloat16)
        x_low = (x - x_high.to(tl.float32)).to(tl.bfloat16)
        y_low = (y - y_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _dot_stored(x, y, PRECISION: tl.constexpr):
    """x @ y for float32 x and y as stored: exact in y, x to 2^-17 when y has 16 bits."""
    if y.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, y, tl.dot(high, y))
    return _dot(x, y.to(tl.float32), PRECISION)


@triton.jit
def _dot_inputs(x, y, PRECISION: tl.constexpr):
    """x @ y of two inputs as stored."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x, y)
    return _dot(x.to(tl.float32), y.to(tl.float32), PRECISION)


@triton.jit
def _unit_lower_inverse(L, BQ: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for strictly lower triangular L [BQ, BQ]."""
    BLOCKS: tl.constexpr = BQ // 16
    rows = tl.arange(0, BQ)
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(L, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros((BLOCKS, 16, 16), tl.float32)
    for i in tl.range(1, 16, loop_unroll_factor=1, disable_licm=True):
        factors = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
        update = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == i, inverse - update[:, None, :], inverse)
    T = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (BQ, BQ))
    if BQ >= 32:
        T = _double(T, L, rows, 16, PRECISION)
    if BQ >= 64:
        T = _double(T, L, rows, 32, PRECISION)
    return T


@triton.jit
def _double(T, L, rows, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks of 2 SIZE rows from those of SIZE rows."""
    block = rows // SIZE
    pair = rows // (2 * SIZE)
    off = (pair[:, None] == pair[None, :]) & (block[:, None] != block[None, :])
    step = _dot(tl.where(off, L, 0.0), T, PRECISION)
    return T - _dot(T, step, PRECISION)


@triton.jit
def _gates(a, b, rate, bias, rows, Q, stride_a, stride_b):
    """Write strength and log decay (its exact and its remaining part) of these rows; padding has neither."""
    valid = rows < Q
    x = tl.load(a + rows * stride_a, mask=valid, other=0.0).to(tl.float32) + bias
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    g = tl.maximum(tl.where(valid, rate * softplus, 0.0), LEAST_LOG_DECAY)
    exact = tl.floor(g * 128.0) * 0.0078125
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + rows * stride_b, mask=valid, other=0.0).to(tl.float32)))
    return tl.where(valid, beta, 0.0), exact, g - exact


@triton.jit
def _seen(bits, rows, columns, Q, WORDS: tl.constexpr):
    """[rows, columns]: is the column's node the row's ancestor or itself."""
    valid = (rows[:, None] < Q) & (columns[None, :] < Q)
    words = tl.load(bits + rows[:, None] * WORDS + columns[None, :] // 32, mask=valid, other=0)
    return ((words >> (columns[None, :] % 32)) & 1) != 0


@triton.jit
def _rows(x, rows, columns, Q, K, stride):
    """x[rows, columns] as stored, zero beyond Q and K."""
    mask = (rows[:, None] < Q) & (columns[None, :] < K)
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _path_sums(seen, exact, rest):
    """Both parts of the log decay summed over the columns that every row sees."""
    return tl.sum(tl.where(seen, exact[None, :], 0.0), axis=1), tl.sum(
        tl.where(seen, rest[None, :], 0.0), axis=1
    )


@triton.jit
def _decay(seen, exact_to, rest_to, exact_from, rest_from):
    """Decay from every column's node to every row's, 0 where it is not seen (exp of -inf)."""
    log_decay = (exact_to[:, None] - exact_from[None, :]) + (rest_to[:, None] - rest_from[None, :])
    return tl.exp(tl.where(seen, log_decay, float("-inf")))


@triton.jit
def _state_tile(pool, values, channels, slot, K, V):
    """S0[values, channels] as stored, zero without a slot."""
    mask = (values[:, None] < V) & (channels[None, :] < K) & (slot >= 0)
    return tl.load(pool + values[:, None] * K + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _inverse_norm(x):
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
def _block_inverse(
    a,
    b,
    k,
    bits,
    rate,
    bias,
    rows,
    channels,
    Q,
    stride_aq,
    stride_bq,
    stride_kq,
    K: tl.constexpr,
    BQ: tl.constexpr,
    WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows: keys and their norms, gates, path sums and decays within the block, (I + L)^-1."""
    beta, exact, rest = _gates(a, b, rate, bias, rows, Q, stride_aq, stride_bq)
    seen = _seen(bits, rows, rows, Q, WORDS)
    exact_sum, rest_sum = _path_sums(seen, exact, rest)
    keys = _rows(k, rows, channels, Q, K, stride_kq)
    key_norm = _inverse_norm(keys)
    decay = _decay(seen, exact_sum, rest_sum, exact_sum, rest_sum) * key_norm[None, :]
    L = _dot_inputs(keys, tl.trans(keys), PRECISION) * decay * (beta * key_norm)[:, None]
    T = _unit_lower_inverse(tl.where(rows[:, None] > rows[None, :], L, 0.0), BQ, PRECISION)
    return keys, key_norm, beta, exact_sum, rest_sum, decay, T


@triton.jit
def _tree_gdn_solve_kernel(
    a,
    b,
    A_log,
    dt_bias,
    q,
    k,
    v,
    pool,
    slots,
    bits,
    o,
    responses,
    prefix_queries,
    scale,
    Q,
    stride_an,
    stride_aq,
    stride_bn,
    stride_bq,
    stride_qn,
    stride_qq,
    stride_kn,
    stride_kq,
    stride_vn,
    stride_vq,
    stride_slot,
    stride_on,
    stride_oq,
    stride_slots,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BQ: tl.constexpr,
    SECOND: tl.constexpr,
    STREAM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """M and q' of rows 0..BQ - 1, or with SECOND of BQ..2 BQ - 1, which respond to the first block as well.

    STREAM goes on to the outputs; otherwise M and q' are left in memory for `_tree_gdn_stream_kernel`.
    """
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    a += request * stride_an + head
    b += request * stride_bn + head
    q += request * stride_qn + (head // GROUP) * K
    k += request * stride_kn + (head // GROUP) * K
    bits += request * Q * WORDS
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    channels = tl.arange(0, BK)
    rows = tl.arange(0, BQ)
    own = rows
    if SECOND:
        own = BQ + rows
    keys, key_norm, beta, exact_sum, rest_sum, decay, T = _block_inverse(
        a,
        b,
        k,
        bits,
        rate,
        bias,
        own,
        channels,
        Q,
        stride_aq,
        stride_bq,
        stride_kq,
        K,
        BQ,
        WORDS,
        SOLVE_PRECISION,
    )
    place = (request * tl.num_programs(0) + head) * Q
    if WIDTH > BQ and not SECOND:
        # For the second block's launch, in the corner of the responses that is never read.
        tl.store(responses + (place + rows[:, None]) * WIDTH + BQ + rows[None, :], T)
    queries = _rows(q, own, channels, Q, K, stride_qq)
    query_norm = _inverse_norm(queries) * scale
    P = _dot_inputs(queries, tl.trans(keys), SOLVE_PRECISION) * decay * query_norm[:, None]
    M = _dot(P, T, SOLVE_PRECISION)
    if SECOND:
        beta_a, exact_a, rest_a = _gates(a, b, rate, bias, rows, Q, stride_aq, stride_bq)
        seen = _seen(bits, own, rows, Q, WORDS)
        exact_before, rest_before = _path_sums(seen, exact_a, rest_a)
        exact_sum += exact_before
        rest_sum += rest_before
        exact_sum_a, rest_sum_a = _path_sums(_seen(bits, rows, rows, Q, WORDS), exact_a, rest_a)
        keys_a = _rows(k, rows, channels, Q, K, stride_kq)
        norm_a = _inverse_norm(keys_a)
        decay = _decay(seen, exact_sum, rest_sum, exact_sum_a, rest_sum_a) * norm_a[None, :]
        L = _dot_inputs(keys, tl.trans(keys_a), SOLVE_PRECISION) * decay * (beta * key_norm)[:, None]
        P = _dot_inputs(queries, tl.trans(keys_a), SOLVE_PRECISION) * decay * query_norm[:, None]
        P -= _dot(M, L, SOLVE_PRECISION)
        T_a = tl.load(responses + (place + rows[:, None]) * WIDTH + BQ + rows[None, :])
        M_a = _dot(P, T_a, SOLVE_PRECISION) * beta_a[None, :]
    M = M * beta[None, :]
    prefix_decay = tl.exp(exact_sum + rest_sum)
    prefix_query = queries.to(tl.float32) * (prefix_decay * query_norm)[:, None]
    prefix_query -= _dot_stored(M * (prefix_decay * key_norm)[None, :], keys, SOLVE_PRECISION)
    if SECOND:
        key_decay = tl.exp(exact_sum_a + rest_sum_a) * norm_a
        prefix_query -= _dot_stored(M_a * key_decay[None, :], keys_a, SOLVE_PRECISION)

    valid = own[:, None] < Q
    if STREAM:
        v += request * stride_vn + head * V
        o += request * stride_on + head * V + own[:, None] * stride_oq
        slot = tl.load(slots + request * stride_slots).to(tl.int64)
        pool += slot * stride_slot + head.to(tl.int64) * K * V
        for tile in range(tl.cdiv(V, BV)):
            values = tile * BV + tl.arange(0, BV)
            state = _state_tile(pool, values, channels, slot, K, V)
            out = _dot_stored(prefix_query, tl.trans(state), STATE_PRECISION)
            out += _dot_stored(M, _rows(v, rows, values, Q, V, stride_vq), SOLVE_PRECISION)
            mask = valid & (values[None, :] < V)
            tl.store(o + values[None, :], out.to(o.dtype.element_ty), mask=mask)
    else:
        place += own[:, None]
        tl.store(
            prefix_queries + place * K + channels[None, :], prefix_query, mask=valid & (channels < K)[None, :]
        )
        if SECOND:
            tl.store(responses + place * WIDTH + rows[None, :], M_a, mask=valid)
        tl.store(responses + place * WIDTH + own[None, :], M, mask=valid)


@triton.jit
def _tree_gdn_stream_kernel(
    v,
    pool,
    slots,
    o,
    responses,
    prefix_queries,
    Q,
    stride_vn,
    stride_vq,
    stride_slot,
    stride_on,
    stride_oq,
    stride_slots,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BQ: tl.constexpr,
    BLOCKS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDTH: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """o = M v + q' S0 for one block of rows and one tile of value channels."""
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    request = (tl.program_id(2) // BLOCKS).to(tl.int64)
    block = tl.program_id(2) % BLOCKS
    rows = tl.arange(0, BQ)
    own = block * BQ + rows
    channels = tl.arange(0, BK)
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    v += request * stride_vn + head * V
    valid = own[:, None] < Q
    place = (request * HV + head) * Q + own[:, None]
    state = _state_tile(pool + slot * stride_slot + head.to(tl.int64) * K * V, values, channels, slot, K, V)
    prefix_query = tl.load(
        prefix_queries + place * K + channels[None, :], mask=valid & (channels < K)[None, :], other=0.0
    )
    out = _dot_stored(prefix_query, tl.trans(state), STATE_PRECISION)
    for column in tl.static_range(BLOCKS):
        if column <= block:
            M = tl.load(responses + place * WIDTH + column * BQ + rows[None, :], mask=valid, other=0.0)
            out += _dot_stored(M, _rows(v, column * BQ + rows, values, Q, V, stride_vq), SOLVE_PRECISION)
    mask = valid & (values[None, :] < V)
    o += request * stride_on + head * V
    tl.store(o + own[:, None] * stride_oq + values[None, :], out.to(o.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class VerifyConfig:
    """How the kernels are launched and how their float32 products are rounded.

    fused            one launch (Q <= 64): M and q' stay in registers and the tiles of V stream past them.
                     Otherwise two: they go through memory (one layer's, shared by all) and every tile of V
                     has its own program
    block_v          value channels a tile
    solve_precision  products of the triangular solve and the key products of 32-bit inputs
    state_precision  the product with a float32 state
    """

    fused: bool = True
    block_v: int = 64
    num_warps: int = 8
    num_stages: int = 2
    solve_precision: Precision = "tf32"
    state_precision: Precision = "tf32"


FAST = VerifyConfig()
EXACT = VerifyConfig(fused=False, block_v=32, solve_precision="bf16x3", state_precision="bf16x3")


def verify_config(
    width: int, key_dim: int, value_dim: int, exact: bool = False, half: bool = True
) -> VerifyConfig:
    """The launch configuration for Q, K and V; `half`: 16-bit inputs. Fits 99 KB of shared memory a block."""
    config = EXACT if exact else FAST
    if width > 64 or key_dim > 128 or not half:
        config = replace(config, fused=False, block_v=16 if key_dim > 128 else 32, num_stages=1)
    elif width <= 32:
        config = replace(config, num_warps=4)
    return replace(config, block_v=max(16, min(config.block_v, triton.next_power_of_2(value_dim))))


def tree_gdn_verify(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    parents: Tensor,
    *,
    bits: Tensor | None = None,
    scale: float | None = None,
    exact: bool = False,
    out: Tensor | None = None,
    config: VerifyConfig | None = None,
) -> Tensor:
    """Outputs [N, Q, HV, V] of a tree from a layer's raw inputs; the pool is only read.

    a, b        [N, Q, HV], float32 or 16 bits, unit stride over HV;  A_log, dt_bias  [HV]
    q, k, v     [N, Q, H, K], [N, Q, H, K], [N, Q, HV, V], bfloat16, float16 or float32, one dtype; the
                last two dimensions contiguous, so views into SGLang's [N * Q, C] convolution output pass
    state_pool  [slots, HV, V, K], float32 or bfloat16, a slot contiguous
    slots       int[N], negative: no prefix (zero state)
    parents     int[N, Q <= 128], see `ddtree_kernels.ancestry`; not read when `bits` is given
    bits        int32[N, Q, ceil(Q / 32)], contiguous, of `ancestor_bits`: one for every layer of a step
    scale       of q, default K ** -0.5
    exact       all products to float32 accuracy (error <= 1e-4 before rounding to v's dtype)
    out         where to write; default a new tensor in v's dtype

    Raises `KernelInputError` naming the tensor.
    """
    _check(a, b, A_log, dt_bias, q, k, v, state_pool, slots, parents, bits, out)
    bits = ancestor_bits(parents) if bits is None else bits
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    config = config or verify_config(v.shape[1], q.shape[3], v.shape[3], exact, v.element_size() == 2)
    scratch = None if config.fused else verify_scratch(v, q.shape[3])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return tree_gdn_verify_unchecked(
        a, b, A_log, dt_bias, q, k, v, state_pool, slots, bits, out, scratch, scale, config
    )


def tree_gdn_verify_unchecked(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    bits: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, Tensor] | None,
    scale: float,
    config: VerifyConfig,
) -> Tensor:
    """The hot path of `tree_gdn_verify`: no check, no allocation, no synchronisation.

    `scratch` is `verify_scratch` when `config` is not fused; one serves all layers of a step.
    """
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    block = block_rows(width)
    blocks = (width + block - 1) // block
    responses, prefix_queries = (out, out) if scratch is None else scratch
    constants = {
        "K": key_dim,
        "V": value_dim,
        "BQ": block,
        "BK": max(16, triton.next_power_of_2(key_dim)),
        "BV": config.block_v,
        "WIDTH": blocks * block,
        "SOLVE_PRECISION": config.solve_precision,
        "STATE_PRECISION": config.state_precision,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    for second in range(blocks):
        _tree_gdn_solve_kernel[(heads, batch)](
            a,
            b,
            A_log,
            dt_bias,
            q,
            k,
            v,
            state_pool,
            slots,
            bits,
            out,
            responses,
            prefix_queries,
            scale,
            width,
            a.stride(0),
            a.stride(1),
            b.stride(0),
            b.stride(1),
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            state_pool.stride(0),
            out.stride(0),
            out.stride(1),
            slots.stride(0),
            GROUP=heads // key_heads,
            SECOND=second == 1,
            STREAM=config.fused,
            WORDS=bits.shape[2],
            **constants,
        )
    if config.fused:
        return out
    _tree_gdn_stream_kernel[(triton.cdiv(value_dim, config.block_v), heads, batch * blocks)](
        v,
        state_pool,
        slots,
        out,
        responses,
        prefix_queries,
        width,
        v.stride(0),
        v.stride(1),
        state_pool.stride(0),
        out.stride(0),
        out.stride(1),
        slots.stride(0),
        HV=heads,
        BLOCKS=blocks,
        **constants,
    )
    return out


def verify_scratch(v: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Where the unfused form leaves M float32[N, HV, Q, Q rounded up] and q' float32[N, HV, Q, K]."""
    batch, width, heads, _ = v.shape
    block = block_rows(width)
    columns = (width + block - 1) // block * block
    responses = torch.empty(batch, heads, width, columns, dtype=torch.float32, device=v.device)
    return responses, torch.empty(batch, heads, width, key_dim, dtype=torch.float32, device=v.device)


def block_rows(width: int) -> int:
    """Rows that one solve handles: Q up to 64 is one block, more is two."""
    return 16 if width <= 16 else 32 if width <= 32 else 64


def _check(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    parents: Tensor,
    bits: Tensor | None,
    out: Tensor | None,
) -> None:
    if v.ndim != 4 or q.ndim != 4:
        raise KernelInputError(
            f"q, v: found {q.ndim} and {v.ndim} dimensions, allowed are [N, Q, heads, dim]"
        )
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    if not 1 <= width <= MAX_WIDTH or max(key_dim, value_dim) > MAX_HEAD_DIM or heads % key_heads:
        raise KernelInputError(
            f"v: found Q {width}, K {key_dim}, V {value_dim}, HV {heads} over H {key_heads}; allowed are "
            f"Q 1..{MAX_WIDTH}, K and V to {MAX_HEAD_DIM}, HV a multiple of H"
        )
    gate = (batch, width, heads)
    keys = (batch, width, key_heads, key_dim)
    words = (batch, width, (width + 31) // 32)
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("a", a, gate),
        ("b", b, gate),
        ("A_log", A_log, (heads,)),
        ("dt_bias", dt_bias, (heads,)),
        ("q", q, keys),
        ("k", k, keys),
        ("state_pool", state_pool, (state_pool.shape[0], heads, value_dim, key_dim)),
        ("slots", slots, (batch,)),
        ("parents", parents if bits is None else None, (batch, width)),
        ("bits", bits, words),
        ("out", out, tuple(v.shape)),
    ]
    for name, tensor, shape in expected:
        expect_shape(name, tensor, shape)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KernelInputError(
            f"q, k, v: found {q.dtype}, {k.dtype}, {v.dtype}, allowed is one of bfloat16, float16, float32"
        )
    if state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise KernelInputError(f"state_pool: found {state_pool.dtype}, allowed are float32 and bfloat16")
    dense: list[tuple[str, Tensor | None, int]] = [
        ("a", a, 1),
        ("b", b, 1),
        ("A_log", A_log, 1),
        ("dt_bias", dt_bias, 1),
        ("q", q, 2),
        ("k", k, 2),
        ("v", v, 2),
        ("state_pool", state_pool, 3),
        ("bits", bits, 3),
        ("out", out, 2),
    ]
    for name, tensor, dimensions in dense:
        expect_dense(name, tensor, dimensions)
    if bits is not None and bits.dtype != torch.int32:
        raise KernelInputError(f"bits: found {bits.dtype}, allowed is int32")
