"""The two launches of a commit: convolve the accepted rows within the stash, then replay them.

The first is parallel over channels, the second serial over steps and parallel over everything else. So what
does not depend on the state (convolution, gates, lengths of keys) is done once, and lies in the order of the
steps: no address of the replay's loop waits for a load.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code="assignment,var-annotated,misc", warn-unreachable=False
# ruff: noqa: ANN001, ANN202, RUF005
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
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TRACK: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """One head of v, or of k and q, of one layer and request: its rows, its gates and its carried inputs.

    Step t goes to row t, whatever row it came from: v in its dtype, k normalised in float32 over k and q.
    """
    part = tl.program_id(0)
    layer = (tl.program_id(1) // N).to(tl.int64)
    request = (tl.program_id(1) % N).to(tl.int64)
    # No branch on what is loaded: loads that wait for one another would be most of this kernel's time.
    slot = tl.load(slots + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    wanted = slot >= 0
    count = tl.where(wanted, count, 0)
    slot = tl.maximum(slot, 0)
    keyed = part < H
    head = tl.where(keyed, part, part - H)
    first = tl.where(keyed, H * K + head * K, 2 * H * K + head * V)
    place = tl.arange(0, BC)
    valid = (place < tl.where(keyed, K, V)) & wanted
    base = x + layer * stride_xl + request * stride_xn
    path += request * stride_path
    pool = conv_pool + layer * stride_conv_layer
    window = pool + slot * stride_conv_slot + (first + place).to(tl.int64) * stride_conv_c
    taps = weight + layer * stride_wl + (first + place).to(tl.int64) * stride_wc

    # All loads before the first store: the stores are to rows that the others read.
    rows = ()
    for step in tl.static_range(P):
        row = tl.load(path + step).to(tl.int64)
        taken = valid & (step < count)
        rows = rows + (tl.load(base + row * stride_xq + first + place, mask=taken, other=0.0),)
    inputs = ()
    for entry in tl.static_range(TAPS - 1):
        inputs = inputs + (tl.load(window + entry, mask=valid, other=0.0).to(tl.float32),)
    factors = ()
    for tap in tl.static_range(TAPS):
        factors = factors + (tl.load(taps + tap, mask=valid, other=0.0).to(tl.float32),)
    shift = tl.zeros((BC,), dtype=tl.float32)
    if BIAS:
        shift += tl.load(bias + layer * stride_bias + first + place, mask=valid, other=0.0).to(tl.float32)
    _move_windows(
        base, pool, slot, path, track_counts, track_slots, request, first, place, valid, count,
        stride_xq, stride_conv_slot, stride_conv_c, TRACK, TAPS, P,
    )  # fmt: skip
    if keyed:
        _move_windows(
            base, pool, slot, path, track_counts, track_slots, request, head * K, place, valid, count,
            stride_xq, stride_conv_slot, stride_conv_c, TRACK, TAPS, P,
        )  # fmt: skip
    else:
        steps = tl.arange(0, BP)
        taken_steps = steps < count
        row_of = tl.load(path + steps, mask=taken_steps, other=0).to(tl.int64)
        a += layer * stride_al + request * stride_an + head
        b += layer * stride_bl + request * stride_bn + head
        gate = tl.load(a + row_of * stride_aq, mask=taken_steps, other=0.0).to(tl.float32)
        write = tl.load(b + row_of * stride_bq, mask=taken_steps, other=0.0).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + layer * HV + head).to(tl.float32))
        gate += tl.load(dt_bias + layer * HV + head).to(tl.float32)
        gate = tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(gate)), gate)
        fact = facts + ((layer * N + request) * HV + head) * (2 * P) + steps
        tl.store(fact, tl.exp(rate * gate), mask=taken_steps)
        tl.store(fact + P, 1.0 / (1.0 + tl.exp(-write)), mask=taken_steps)
    tl.debug_barrier()

    outputs = ()
    for step in tl.static_range(P):
        inputs = inputs + (rows[step].to(tl.float32),)
        total = tl.zeros((BC,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            total += inputs[step + tap] * factors[tap]
        if BIAS:
            total += shift
        if SILU:
            total = silu(total)
        outputs = outputs + (total.to(x.dtype.element_ty),)
    if keyed:
        at = _keys(base, H, K) + _key_places(x, head, place, H, K)
        for step in tl.static_range(P):
            keys = outputs[step].to(tl.float32)
            keys *= 1.0 / tl.sqrt(tl.sum(keys * keys, axis=0) + 1e-6)
            tl.store(at + step * _key_pitch(x, stride_xq), keys, mask=valid & (step < count))
    else:
        for step in tl.static_range(P):
            tl.store(base + step * stride_xq + first + place, outputs[step], mask=valid & (step < count))


@triton.jit
def _keys(row, H: tl.constexpr, K: tl.constexpr):
    """Where a row's float32 keys lie: over q and k where these have 16 bits, else over k."""
    if row.dtype.element_ty == tl.float32:
        return row + H * K
    return row.to(tl.pointer_type(tl.float32))


@triton.jit
def _key_places(x, head, place, H: tl.constexpr, K: tl.constexpr):
    """Channels of a key there: in 16 bits the first half over the head's own q, the second over its k."""
    if x.dtype.element_ty == tl.float32:
        return head * K + place
    return head * (K // 2) + place + tl.where(place < K // 2, 0, (H * K - K) // 2)


@triton.jit
def _key_pitch(x, pitch):
    """Float32 elements from row to row."""
    if x.dtype.element_ty == tl.float32:
        return pitch
    return pitch // 2


@triton.jit
def _move_windows(
    base,
    pool,
    slot,
    path,
    track_counts,
    track_slots,
    request,
    first,
    place,
    valid,
    count,
    stride_xq,
    stride_conv_slot,
    stride_conv_c,
    TRACK: tl.constexpr,
    TAPS: tl.constexpr,
    P: tl.constexpr,
):
    """Carry some channels' windows to the end of the path and, if asked for, to the snapshot's row."""
    x = base + first
    channels = pool + (first + place).to(tl.int64) * stride_conv_c
    window = channels + slot * stride_conv_slot
    moved = _moved_window(x, window, path, place, valid, count, stride_xq, TAPS, P)
    if TRACK:
        track = tl.load(track_counts + request).to(tl.int32)
        target = tl.load(track_slots + request).to(tl.int64)
        keep = valid & (track >= 0) & (track <= count) & (target >= 0)
        snapshot = _moved_window(x, window, path, place, keep, track, stride_xq, TAPS, P)
        for entry in tl.static_range(TAPS - 1):
            tl.store(channels + target * stride_conv_slot + entry, snapshot[entry], mask=keep)
    tl.debug_barrier()
    for entry in tl.static_range(TAPS - 1):
        tl.store(window + entry, moved[entry], mask=valid)


@triton.jit
def _moved_window(x, window, path, place, mask, count, stride_xq, TAPS: tl.constexpr, P: tl.constexpr):
    """The window after `count` rows: entry p is input p + count of the carried ones followed by the path."""
    moved = ()
    for entry in tl.static_range(TAPS - 1):
        step = entry + count - (TAPS - 1)
        kept = tl.load(window + (entry + count), mask=mask & (step < 0), other=0.0)
        row = tl.load(path + step, mask=(step >= 0) & (step < P), other=0).to(tl.int64)
        new = tl.load(x + row * stride_xq + place, mask=mask & (step >= 0), other=0.0)
        moved = moved + (tl.where(step < 0, kept, new.to(kept.dtype)),)
    return moved


@triton.jit
def _commit_kernel(
    x,
    state_pool,
    slots,
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
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    TRACK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some rows of one head's state. A row's keys are in pieces, whose sum is taken within a thread; few
    threads share a piece. While a step is computed, keys of the next STAGES - 1 are on their way to shared
    memory, the rest of the next step's inputs to registers.
    """
    PIECE: tl.constexpr = BK // PIECES
    WHOLE: tl.constexpr = BK == K and V % BV == 0
    head = tl.program_id(1)
    layer = (tl.program_id(2) // N).to(tl.int64)
    request = (tl.program_id(2) % N).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    if slot < 0:
        return
    key_head = head // (HV // H)
    x += layer * stride_xl + request * stride_xn
    keys = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    tile = values[:, None, None] * K + keys[None, :, :]
    rows = values < V
    inside = keys < K
    both = rows[:, None, None] & inside[None, :, :]
    pool = state_pool + layer * stride_state_layer + head.to(tl.int64) * K * V
    own = pool + slot * stride_state_slot + tile
    state = _load(own, both, WHOLE).to(tl.float32)
    keys_at = _keys(x, H, K) + _key_places(x, key_head, keys, H, K)
    pitch = _key_pitch(x, stride_xq)
    values_at = x + (2 * H * K + head * V) + values
    fact = facts + ((layer * N + request) * HV + head) * (2 * P)
    # Up to the snapshot, if there is one, and from there to the end.
    begin = count * 0
    end = count
    if TRACK:
        track = tl.load(track_counts + request).to(tl.int32)
        target = tl.load(track_slots + request).to(tl.int64)
        tracked = (track >= 0) & (track <= count) & (target >= 0)
        end = tl.where(tracked, track, count)
    v = _load(values_at, rows, WHOLE)
    decay = tl.load(fact)
    beta = tl.load(fact + P)
    # Unrolled: in a loop around the pipelined one, compiled code lost what its first round did to the state.
    for part in tl.static_range(2 if TRACK else 1):
        for step in tl.range(begin, end, num_stages=STAGES):
            k = _load(keys_at + step * pitch, inside, WHOLE)[None, :, :]
            # The last step loads its own inputs again rather than those of a row that may not be there.
            following = tl.minimum(step + 1, count - 1)
            next_v = _load(values_at + following * stride_xq, rows, WHOLE)
            next_decay = tl.load(fact + following)
            next_beta = tl.load(fact + following + P)
            state *= decay
            read = tl.sum(tl.sum(state * k, axis=1), axis=1)
            u = (v.to(tl.float32) - read) * beta
            state += u[:, None, None] * k
            v, decay, beta = next_v, next_decay, next_beta
        if TRACK:
            begin = end
            end = count
            if tracked & (part == 0):
                _keep(pool + target * stride_state_slot + tile, state, both, WHOLE)
    if count > 0:
        _keep(own, state, both, WHOLE)


@triton.jit
def _load(pointer, valid, WHOLE: tl.constexpr):
    """Without a mask where nothing overruns."""
    return tl.load(pointer) if WHOLE else tl.load(pointer, mask=valid, other=0.0)


@triton.jit
def _keep(at, state, valid, WHOLE: tl.constexpr):
    """Write a state in the pool's dtype."""
    if WHOLE:
        tl.store(at, state.to(at.dtype.element_ty))
    else:
        tl.store(at, state.to(at.dtype.element_ty), mask=valid)
