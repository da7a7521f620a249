"""The two launches of a commit: convolve the accepted rows where they lie, then replay them.

The first is parallel over steps and channels, the second serial over steps and parallel over everything
else. So what does not depend on the state (convolution, gates, lengths of keys) is done once a step, and the
replay's loop holds only the delta rule.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from ddtree_kernels.tree_conv.triton import silu


@triton.jit
def _commit_conv_kernel(
    x,
    a,
    b,
    A_log,
    dt_bias,
    weight,
    bias,
    conv_pool,
    slots,
    path,
    counts,
    track_counts,
    track_slots,
    facts,
    N,
    P,
    stride_xl,
    stride_xn,
    stride_xq,
    stride_al,
    stride_an,
    stride_aq,
    stride_bl,
    stride_bn,
    stride_bq,
    stride_conv_layer,
    stride_conv_slot,
    stride_conv_c,
    stride_path,
    stride_wl,
    stride_wc,
    stride_bias,
    stride_facts,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TRACK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """One head of q, k or v of one layer and request: its rows, its facts and its carried inputs."""
    part = tl.program_id(0)
    layer = (tl.program_id(1) // N).to(tl.int64)
    request = (tl.program_id(1) % N).to(tl.int64)
    # No branch on what is loaded: loads that wait for one another would be most of this kernel's time.
    slot = tl.load(slots + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    wanted = slot >= 0
    count = tl.where(wanted, count, 0)
    slot = tl.maximum(slot, 0)
    valued = part >= 2 * H
    head = part - tl.where(valued, 2 * H, H)
    place = tl.arange(0, BC)
    valid = place < tl.where(valued, V, K)
    first = tl.where(valued, 2 * H * K + (part - 2 * H) * V, part * K)
    channels = first + place
    x += layer * stride_xl + request * stride_xn + first
    a += layer * stride_al + request * stride_an
    b += layer * stride_bl + request * stride_bn
    path += request * stride_path
    weight += layer * stride_wl + first * stride_wc
    bias += layer * stride_bias + first
    pool = conv_pool + layer * stride_conv_layer + channels.to(tl.int64) * stride_conv_c
    window = pool + slot * stride_conv_slot
    facts += (layer * N + request) * stride_facts

    # The windows read inputs that the convolution is about to overwrite.
    valid = valid & wanted
    moved = _moved_window(x, window, path, place, valid, count, P, stride_xq, TAPS)
    if TRACK:
        track = tl.load(track_counts + request).to(tl.int32)
        target = tl.load(track_slots + request).to(tl.int64)
        keep = valid & (track >= 0) & (track <= count) & (target >= 0)
        snapshot = _moved_window(x, window, path, place, keep, track, P, stride_xq, TAPS)

    if part >= H:
        # From the last block of steps to the first: a step needs the inputs of those before it.
        for block in range(BLOCKS):
            steps = (BLOCKS - 1 - block) * BP + tl.arange(0, BP)
            taken = steps < count
            # All loads before the first use: none of them waits for another's.
            row = tl.load(path + steps, mask=steps < P, other=0).to(tl.int64)
            gated = taken & valued
            gate = tl.load(a + row * stride_aq + head, mask=gated, other=0.0).to(tl.float32)
            write = tl.load(b + row * stride_bq + head, mask=gated, other=0.0).to(tl.float32)
            inputs = ()
            for tap in tl.static_range(TAPS):
                at = steps - (TAPS - 1 - tap)
                at_row = tl.load(path + at, mask=(at >= 0) & (at < P), other=0).to(tl.int64)
                inside = (taken & (at >= 0))[:, None] & valid[None, :]
                tile = x + at_row[:, None] * stride_xq + place[None, :]
                inputs = inputs + (tl.load(tile, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
            total = tl.zeros((BP, BC), dtype=tl.float32)
            # The oldest inputs come first: what the first steps take from the window.
            for early in tl.static_range(TAPS - 1):
                behind = tl.zeros((BC,), dtype=tl.float32)
                for tap in tl.static_range(TAPS - 1 - early):
                    carried = tl.load(window + (early + tap), mask=valid, other=0.0).to(tl.float32)
                    factor = tl.load(weight + place * stride_wc + tap, mask=valid, other=0.0).to(tl.float32)
                    behind += carried * factor
                total = tl.where((steps == early)[:, None], behind[None, :], total)
            for tap in tl.static_range(TAPS):
                factor = tl.load(weight + place * stride_wc + tap, mask=valid, other=0.0).to(tl.float32)
                total += inputs[tap].to(tl.float32) * factor[None, :]
            if BIAS:
                total += tl.load(bias + place, mask=valid, other=0.0).to(tl.float32)[None, :]
            if SILU:
                total = silu(total)
            rounded = total.to(x.dtype.element_ty)
            fact = facts + steps * (2 * HV + H)
            if valued:
                rate = -tl.exp(tl.load(A_log + layer * HV + head).to(tl.float32))
                shift = tl.load(dt_bias + layer * HV + head).to(tl.float32)
                gate += shift
                gate = tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(gate)), gate)
                tl.store(fact + head, tl.exp(rate * gate), mask=taken)
                tl.store(fact + HV + head, 1.0 / (1.0 + tl.exp(-write)), mask=taken)
            else:
                keys = rounded.to(tl.float32)
                length = tl.sqrt(tl.sum(keys * keys, axis=1) + 1e-6)
                tl.store(fact + 2 * HV + head, 1.0 / length, mask=taken)
            tl.debug_barrier()
            tl.store(
                x + row[:, None] * stride_xq + place[None, :],
                rounded,
                mask=taken[:, None] & valid[None, :],
            )
    tl.debug_barrier()
    for entry in tl.static_range(TAPS - 1):
        tl.store(window + entry, moved[entry], mask=valid)
        if TRACK:
            tl.store(pool + target * stride_conv_slot + entry, snapshot[entry], mask=keep)


@triton.jit
def _moved_window(x, window, path, place, mask, count, P, stride_xq, TAPS: tl.constexpr):
    """The window after `count` rows: entry p is input p + count of the carried ones followed by the path."""
    moved = ()
    for entry in tl.static_range(TAPS - 1):
        step = entry + count - (TAPS - 1)
        kept = tl.load(window + (entry + count), mask=mask & (step < 0), other=0.0)
        row = tl.load(path + step, mask=(step >= 0) & (step < P), other=0).to(tl.int64)
        new = tl.load(x + row * stride_xq + place, mask=mask & (step >= 0), other=0.0)
        moved = moved + (tl.where(step < 0, kept, new.to(kept.dtype)),)  # type: ignore[assignment]  # noqa: RUF005
    return moved


@triton.jit
def _commit_kernel(
    x,
    state_pool,
    slots,
    path,
    counts,
    track_counts,
    track_slots,
    facts,
    N,
    stride_xl,
    stride_xn,
    stride_xq,
    stride_state_layer,
    stride_state_slot,
    stride_path,
    stride_facts,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TRACK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Some rows of one head's state, in four pieces of the keys: a row's sum is three additions in a thread,
    and few between threads."""
    PIECE: tl.constexpr = BK // 4
    WHOLE: tl.constexpr = BK == K and V % BV == 0
    FACTS: tl.constexpr = 2 * HV + H
    PARTS: tl.constexpr = 2 if TRACK else 1
    head = tl.program_id(1)
    layer = (tl.program_id(2) // N).to(tl.int64)
    request = (tl.program_id(2) % N).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    if slot < 0:
        return
    key_head = head // (HV // H)
    x += layer * stride_xl + request * stride_xn
    path += request * stride_path
    facts += (layer * N + request) * stride_facts
    keys = tl.arange(0, PIECE)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    tile = values[:, None] * K + keys[None, :]
    pool = state_pool + layer * stride_state_layer + head.to(tl.int64) * K * V
    own = pool + slot * stride_state_slot + tile
    rows = values < V
    in0, in1, in2, in3 = keys < K, PIECE + keys < K, 2 * PIECE + keys < K, 3 * PIECE + keys < K
    s0 = _load(own, rows[:, None] & in0[None, :], WHOLE).to(tl.float32)
    s1 = _load(own + PIECE, rows[:, None] & in1[None, :], WHOLE).to(tl.float32)
    s2 = _load(own + 2 * PIECE, rows[:, None] & in2[None, :], WHOLE).to(tl.float32)
    s3 = _load(own + 3 * PIECE, rows[:, None] & in3[None, :], WHOLE).to(tl.float32)
    keys_at = x + (H * K + key_head * K) + keys
    values_at = x + (2 * H * K + head * V) + values
    # Up to the snapshot, if there is one, and from there to the end.
    end = count
    if TRACK:
        track = tl.load(track_counts + request).to(tl.int32)
        target = tl.load(track_slots + request).to(tl.int64)
        tracked = (track >= 0) & (track <= count) & (target >= 0)
        end = tl.where(tracked, track, count)
    begin = count * 0
    for part in range(PARTS):
        # A step's inputs are loaded while the one before is computed: no load waits for the state.
        inside = begin < end
        row = tl.load(path + begin, mask=inside, other=0).to(tl.int64) * stride_xq
        following = tl.load(path + begin + 1, mask=begin + 1 < end, other=0).to(tl.int64)
        k0 = _load(keys_at + row, in0, WHOLE)
        k1 = _load(keys_at + (row + PIECE), in1, WHOLE)
        k2 = _load(keys_at + (row + 2 * PIECE), in2, WHOLE)
        k3 = _load(keys_at + (row + 3 * PIECE), in3, WHOLE)
        v = _load(values_at + row, rows, WHOLE)
        fact = facts + begin * FACTS
        decay = tl.load(fact + head, mask=inside, other=0.0)
        beta = tl.load(fact + HV + head, mask=inside, other=0.0)
        scale = tl.load(fact + 2 * HV + key_head, mask=inside, other=0.0)
        for step in range(begin, end):
            row = following * stride_xq
            following = tl.load(path + step + 2, mask=step + 2 < end, other=0).to(tl.int64)
            next_k0 = _load(keys_at + row, in0, WHOLE)
            next_k1 = _load(keys_at + (row + PIECE), in1, WHOLE)
            next_k2 = _load(keys_at + (row + 2 * PIECE), in2, WHOLE)
            next_k3 = _load(keys_at + (row + 3 * PIECE), in3, WHOLE)
            next_v = _load(values_at + row, rows, WHOLE)
            fact += FACTS
            next_decay = tl.load(fact + head, mask=step + 1 < end, other=0.0)
            next_beta = tl.load(fact + HV + head, mask=step + 1 < end, other=0.0)
            next_scale = tl.load(fact + 2 * HV + key_head, mask=step + 1 < end, other=0.0)
            f0 = k0.to(tl.float32)
            f1 = k1.to(tl.float32)
            f2 = k2.to(tl.float32)
            f3 = k3.to(tl.float32)
            s0 *= decay
            s1 *= decay
            s2 *= decay
            s3 *= decay
            f0 *= scale
            f1 *= scale
            f2 *= scale
            f3 *= scale
            products = s0 * f0[None, :] + s1 * f1[None, :] + s2 * f2[None, :] + s3 * f3[None, :]
            read = tl.sum(products, axis=1)
            u = ((v.to(tl.float32) - read) * beta)[:, None]
            s0 += u * f0[None, :]
            s1 += u * f1[None, :]
            s2 += u * f2[None, :]
            s3 += u * f3[None, :]
            k0, k1, k2, k3, v = next_k0, next_k1, next_k2, next_k3, next_v
            decay, beta, scale = next_decay, next_beta, next_scale
        if TRACK:
            begin = end
            end = count
            if tracked & (part == 0):
                kept = pool + target * stride_state_slot + tile
                _keep(kept, s0, s1, s2, s3, rows, in0, in1, in2, in3, PIECE, WHOLE)
    if count > 0:
        _keep(own, s0, s1, s2, s3, rows, in0, in1, in2, in3, PIECE, WHOLE)


@triton.jit
def _load(pointer, valid, WHOLE: tl.constexpr):
    """Without a mask where nothing overruns."""
    return tl.load(pointer) if WHOLE else tl.load(pointer, mask=valid, other=0.0)


@triton.jit
def _keep(at, s0, s1, s2, s3, rows, in0, in1, in2, in3, PIECE: tl.constexpr, WHOLE: tl.constexpr):
    """Write a state's pieces in the pool's dtype."""
    kind = at.dtype.element_ty
    if WHOLE:
        tl.store(at, s0.to(kind))
        tl.store(at + PIECE, s1.to(kind))
        tl.store(at + 2 * PIECE, s2.to(kind))
        tl.store(at + 3 * PIECE, s3.to(kind))
    else:
        tl.store(at, s0.to(kind), mask=rows[:, None] & in0[None, :])
        tl.store(at + PIECE, s1.to(kind), mask=rows[:, None] & in1[None, :])
        tl.store(at + 2 * PIECE, s2.to(kind), mask=rows[:, None] & in2[None, :])
        tl.store(at + 3 * PIECE, s3.to(kind), mask=rows[:, None] & in3[None, :])
