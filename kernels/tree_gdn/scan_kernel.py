"""The kernel of the scan form: nodes depth first, the state in registers along every spine.

A program carries one tile of a head's state. A node's first child follows it and finds the state where it
left it; only a node with several children leaves a copy in scratch memory, which its later children read.
All arithmetic is float32, in the order of a plain decode.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tree_gdn_scan_kernel(
    a, b, A_log, dt_bias, q, k, v, pool, slots, order, reload, keep, o, states, scale, Q,
    stride_an, stride_aq, stride_bn, stride_bq, stride_qn, stride_qq, stride_kn, stride_kq,
    stride_vn, stride_vq, stride_slot, stride_on, stride_oq, stride_slots,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    channels = tl.arange(0, BK)
    inside = channels < K
    a += request * stride_an + head
    b += request * stride_bn + head
    q += request * stride_qn + (head // GROUP) * K + channels
    k += request * stride_kn + (head // GROUP) * K + channels
    v += request * stride_vn + head * V + values
    o += request * stride_on + head * V + values
    order += request * Q
    reload += request * Q
    keep += request * Q
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    mask = (values < V)[:, None] & inside[None, :]
    tile = values[:, None] * K + channels[None, :]
    slot = tl.load(slots + request * stride_slots).to(tl.int64)
    pool += tl.maximum(slot, 0) * stride_slot + head.to(tl.int64) * K * V
    states += (request * HV + head) * COPIES * K * V
    state = tl.zeros((BV, BK), tl.float32)
    for step in range(Q):
        row = tl.load(order + step)
        source = tl.load(reload + step)
        if source == -1:
            state = tl.load(pool + tile, mask=mask & (slot >= 0), other=0.0).to(tl.float32)
        if source >= 0:
            state = tl.load(states + source.to(tl.int64) * K * V + tile, mask=mask, other=0.0)
        key = tl.load(k + row * stride_kq, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + row * stride_qq, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(v + row * stride_vq, mask=values < V, other=0.0).to(tl.float32)
        key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
        query = query * (scale / tl.sqrt(tl.sum(query * query) + 1e-6))
        gate = tl.load(a + row * stride_aq).to(tl.float32) + bias
        gate = tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(gate)), gate)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * stride_bq).to(tl.float32)))
        state *= tl.exp(rate * gate)
        update = (value - tl.sum(state * key[None, :], axis=1)) * beta
        state += update[:, None] * key[None, :]
        out = tl.sum(state * query[None, :], axis=1)
        tl.store(o + row * stride_oq, out.to(o.dtype.element_ty), mask=values < V)
        copy = tl.load(keep + step)
        if copy >= 0:
            tl.store(states + copy.to(tl.int64) * K * V + tile, state, mask=mask)
            tl.debug_barrier()
