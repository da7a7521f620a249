"""Gated delta rule over a tree on the GPU, from a layer's raw inputs, in one of two forms.

**WY form.** With L = strictly lower part of beta_i (k_i . k_j) D[i, j] and P = (q_i . k_j) D[i, j] on and
below the diagonal (`ddtree_kernels.tree_gdn.wy` has the derivation), a layer's output is linear in v and S0:

    M   = P (I + L)^-1 diag(beta)                 [Q, Q]
    q'  = exp(G_i) q_i - M diag(exp(G_j)) k_j     [Q, K]
    o   = M v + q' S0                             two products, streamed over tiles of V

Trees of bfloat16 inputs at K = V = 128 take a shorter way in one launch (`one_launch_kernels`), through
what every node writes.

No state is written. Trees of up to 32 nodes, and of up to 64 on Hopper, take one launch, whose programs solve
a tree again for every tile of value channels: that is less than going through memory, and small batches leave
cores idle that do it for nothing. Wider trees are solved once per request and head, in three launches (invert
diagonal blocks, respond, stream).

**Why it is stable.** M[i, j] is the response of node i to a unit write at node j, q'_i that of node i to the
prefix state: products of decays and of the contractions I - beta k k^T, so |M| <= beta and |q'_i| <= |q_i|,
however correlated the keys are. The inverses of the diagonal blocks have the same bound. They are built by
forward substitution in blocks of 16 rows, which are then joined by products of bounded factors; no power of L
is ever formed.

**Precision.** k and v enter products as they are stored: for bfloat16 inputs `k k^T` and `q k^T` are exact
products summed in float32 and normalised afterwards, and the float32 factors M are split into two 16-bit
parts (relative rounding 2^-17). Products of two float32 blocks, the solve's own and that with a float32
state, are three bfloat16 products each, to 2^-16 of their factors: with tf32's 2^-10 the solve fails on
correlated keys, and q' S0 loses its digits where it cancels. Log decays are summed as a multiple of 2^-7,
exactly, and a remainder below 1, so that differences of large sums keep their digits.

**Scan form.** One program per head and tile of V walks the nodes depth first with the state in registers;
only branches go through memory, one layer's worth, shared by all layers. All of it is float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import triton
from ddtree_kernels import toolchain
from ddtree_kernels.ancestry import DepthFirst
from ddtree_kernels.ancestry.triton import ancestor_bits, depth_first
from ddtree_kernels.checks import expect_dense, expect_shape
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_gdn.dispatch import Form, choose_form
from ddtree_kernels.tree_gdn.fused_kernel import _tree_gdn_fused_kernel
from ddtree_kernels.tree_gdn.one_launch_kernels import _tree_gdn_tiles_kernel, _tree_gdn_writes_kernel
from ddtree_kernels.tree_gdn.products import Precision
from ddtree_kernels.tree_gdn.scan_kernel import _tree_gdn_scan_kernel
from ddtree_kernels.tree_gdn.wy_kernels import (
    _tree_gdn_invert_kernel,
    _tree_gdn_respond_kernel,
    _tree_gdn_stream_kernel,
)
from torch import Tensor

MAX_WIDTH = 128
MAX_HEAD_DIM = 256
# Most nodes that one launch solves, on any card and at all; rows of a block of wider trees.
SMALL_WIDTH, FUSED_WIDTH = 32, 64
BLOCK_ROWS = 32


@dataclass(frozen=True)
class VerifyConfig:
    """How the three launches of a wider tree are cut and rounded.

    block_v, block_k   value channels a program streams, key channels it takes at a time
    num_warps, num_stages            of the stream kernel
    solve_warps                      of the invert and respond kernels
    precision          all products that are not exact as stored
    """

    block_v: int = 32
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    solve_warps: int = 4
    precision: Precision = "bf16x3"


@dataclass(frozen=True)
class FusedConfig:
    """How the one launch of a tree of up to 64 nodes is cut and rounded.

    block_v, block_k  as in `VerifyConfig`
    chunk             key channels of q and k taken at a time
    num_warps         at most one for 16 rows, unless columns are to be shared
    precision         all products that are not exact as stored
    """

    block_v: int
    block_k: int
    chunk: int
    num_warps: int
    precision: Precision = "bf16x3"


@dataclass(frozen=True)
class WritesConfig:
    """How the one launch of a tree of bfloat16 inputs is cut.

    block_v    value channels a program takes; V is a multiple of it
    tile       of these at a time, after one solve; 0: all at once, solved for what nodes write
    num_warps  one for 16 rows, four for 64
    """

    block_v: int
    tile: int
    num_warps: int


Config = VerifyConfig | FusedConfig | WritesConfig


class Scratch(NamedTuple):
    """What the WY form leaves between its launches, float32; one layer's, shared by all layers of a step.

    responses       [N, HV, Q, Q rounded up], M; blocks right of the diagonal stay unwritten
    prefix_queries  [N, HV, Q, K], q'
    inverses        [N, HV, Q rounded up, block], diagonal blocks of (I + L)^-1
    facts           [N, HV, 4, Q rounded up], what a block needs to know of the nodes of another
    """

    responses: Tensor
    prefix_queries: Tensor
    inverses: Tensor
    facts: Tensor


def config_of(
    width: int,
    key_dim: int,
    value_dim: int,
    element_size: int = 2,
    *,
    heads: int = 48,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Config:
    """The launch configuration of the kernels that this width takes on this card (default: any).

    element_size and dtype are q's, heads all requests' value heads.
    """
    if takes_one_launch(width, key_dim, value_dim, element_size, device):
        if element_size == 2 and dtype == torch.bfloat16 and takes_writes(width, key_dim, value_dim, heads):
            return writes_config(width, heads)
        return fused_config(width, key_dim, value_dim, element_size, heads)
    return verify_config(key_dim, value_dim)


def takes_one_launch(
    width: int, key_dim: int, value_dim: int, element_size: int, device: torch.device | None
) -> bool:
    """Whether a tree of this width is solved in one launch; above 32 nodes that is only known of Hopper."""
    if width <= SMALL_WIDTH:
        return True
    fits = width <= FUSED_WIDTH and element_size == 2 and max(key_dim, value_dim) <= 128
    return fits and device is not None and toolchain.runs_warp_groups(device)


def takes_writes(width: int, key_dim: int, value_dim: int, heads: int = 48) -> bool:
    """Whether the kernels of `one_launch_kernels` serve this shape.

    17 to 32 nodes, and 33 to 64 with many heads, spill registers there.
    """
    right_size = width <= 16 or (SMALL_WIDTH < width <= FUSED_WIDTH and heads <= 64)
    return right_size and key_dim == value_dim == 128


def writes_config(width: int, heads: int = 48) -> WritesConfig:
    """That of one launch of bfloat16 inputs, as measured on an H200; heads are all requests' value heads.

    Few heads: narrow tiles, so that every core has programs. Many: one solve serves more value channels.
    """
    if width <= 16:
        if heads <= 96:
            return WritesConfig(block_v=16, tile=0, num_warps=1)
        return WritesConfig(block_v=32 if heads <= 256 else 64, tile=16, num_warps=1)
    return WritesConfig(block_v=32, tile=0, num_warps=4)


def fused_config(
    width: int, key_dim: int, value_dim: int, element_size: int = 2, heads: int = 48
) -> FusedConfig:
    """That of one launch, as measured on an H200 among those that spill on no card that they are for.

    element_size is q's bytes an element; heads are all requests' value heads. The more there are, the more
    value channels a program takes: it solves its tree once for all of them.
    """
    padded_k, padded_v = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    narrow = element_size == 2
    if width <= 16:
        few = narrow and heads <= 96
        block_v, block_k, num_warps = (16, 64, 1) if few else (32, 32, 1)
    elif width <= SMALL_WIDTH:
        many = narrow and heads > 256
        block_v, block_k, num_warps = (128, 32, 4) if many else (64, 64 if narrow else 32, 2)
    else:
        block_v, block_k, num_warps = (64, 64, 4) if heads <= 64 else (128, 32, 4)
    return FusedConfig(
        block_v=min(block_v, padded_v),
        block_k=min(block_k, padded_k),
        chunk=min(64 if narrow else 16, padded_k),
        num_warps=num_warps,
    )


def verify_config(key_dim: int, value_dim: int) -> VerifyConfig:
    """That of three launches for these head dimensions: no spills, within 99 KB of shared memory."""
    config = VerifyConfig()
    block_k = min(config.block_k, max(16, triton.next_power_of_2(key_dim)))
    block_v = max(16, min(config.block_v, triton.next_power_of_2(value_dim)))
    return replace(config, block_k=block_k, block_v=block_v, solve_warps=4 if key_dim <= 128 else 8)


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
    out: Tensor | None = None,
    config: Config | None = None,
    form: Form | Literal["auto"] = "wy",
    scratch: Scratch | None = None,
) -> Tensor:
    """Outputs [N, Q, HV, V] of a tree from a layer's raw inputs; the pool is only read.

    a, b        [N, Q, HV], float32 or 16 bits, unit stride over HV;  A_log, dt_bias  [HV]
    q, k, v     [N, Q, H, K], [N, Q, H, K], [N, Q, HV, V], bfloat16, float16 or float32, one dtype; the
                last two dimensions contiguous, so views into SGLang's [N * Q, C] convolution output pass
    state_pool  [slots, HV, V, K], float32 or bfloat16, a slot contiguous
    slots       int[N], negative: no prefix (zero state)
    parents     int[N, Q <= 128], see `ddtree_kernels.ancestry`; the WY form reads `bits` instead, if given
    bits        int32[N, Q, ceil(Q / 32)], contiguous, of `ancestor_bits`: one for every layer of a step
    scale       of q, default K ** -0.5
    out         where to write; default a new tensor in v's dtype
    form        "wy", "scan", or "auto": what `choose_form` says for this shape
    scratch     the WY form's buffers, of `verify_scratch` for as many requests or more; default new ones

    Raises `KernelInputError` naming the tensor.
    """
    _check(a, b, A_log, dt_bias, q, k, v, state_pool, slots, parents, bits, out)
    batch, width, _, value_dim = v.shape
    key_dim = q.shape[3]
    bits = ancestor_bits(parents) if bits is None else bits
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    scale = key_dim**-0.5 if scale is None else scale
    if form == "auto":
        form = choose_form(batch, width)
    if form == "scan":
        walk = depth_first(parents, bits)
        states = scan_scratch(v, key_dim)
        return tree_gdn_scan_unchecked(
            a, b, A_log, dt_bias, q, k, v, state_pool, slots, walk, out, states, scale
        )
    config = config or config_of(
        width, key_dim, value_dim, q.element_size(), heads=batch * v.shape[2], device=v.device, dtype=q.dtype
    )
    allowed: set[type] = {VerifyConfig} if width > FUSED_WIDTH else {FusedConfig}
    if SMALL_WIDTH < width <= FUSED_WIDTH:
        allowed = {VerifyConfig, FusedConfig}
    if width <= FUSED_WIDTH and q.dtype == torch.bfloat16 and takes_writes(width, key_dim, value_dim):
        allowed.add(WritesConfig)
    if type(config) not in allowed:
        names = " or ".join(sorted(one.__name__ for one in allowed))
        raise KernelInputError(
            f"config: found {type(config).__name__}, allowed is {names} for a tree of {width} nodes"
        )
    if scratch is None:
        scratch = verify_scratch(v, key_dim)
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
    scratch: Scratch,
    scale: float,
    config: Config,
) -> Tensor:
    """The hot path of `tree_gdn_verify` in the WY form: no check, no allocation, no synchronisation.

    `scratch` is `verify_scratch`; one serves all layers of a step.
    """
    if isinstance(config, FusedConfig | WritesConfig):
        inputs = a, b, A_log, dt_bias, q, k, v, state_pool, slots, bits, out, scale, config
        if v.shape[1] <= SMALL_WIDTH or not toolchain.is_hopper(v.device):
            return _fused(*inputs)
        newer = toolchain.right_ptxas()
        if newer is None:
            raise KernelInputError(
                f"config: found {type(config).__name__} for {v.shape[1]} nodes, "
                "allowed on Hopper only with ptxas 12.9 or newer"
            )
        with toolchain.assembled_by(newer[0]):
            return _fused(*inputs, ptxas=newer[1])
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    blocks = triton.cdiv(width, BLOCK_ROWS)
    constants = {"K": key_dim, "BQ": BLOCK_ROWS, "BLOCKS": blocks, "PRECISION": config.precision}
    solve = {
        "GROUP": heads // key_heads,
        "KC": key_chunk(key_dim, q.element_size()),
        "WORDS": bits.shape[2],
        "num_warps": config.solve_warps,
        "num_stages": 1,
    }
    _tree_gdn_invert_kernel[(heads, blocks, batch)](
        a,
        b,
        A_log,
        dt_bias,
        k,
        bits,
        scratch.inverses,
        scratch.facts,
        width,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        k.stride(0),
        k.stride(1),
        **constants,
        **solve,
    )
    _tree_gdn_respond_kernel[(heads, blocks, batch)](
        q,
        k,
        bits,
        scratch.inverses,
        scratch.facts,
        scratch.responses,
        scratch.prefix_queries,
        scale,
        width,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        **constants,
        **solve,
    )
    _tree_gdn_stream_kernel[(triton.cdiv(value_dim, config.block_v), heads, batch * blocks)](
        v,
        state_pool,
        slots,
        out,
        scratch.responses,
        scratch.prefix_queries,
        width,
        v.stride(0),
        v.stride(1),
        state_pool.stride(0),
        out.stride(0),
        out.stride(1),
        slots.stride(0),
        HV=heads,
        V=value_dim,
        BK=config.block_k,
        BV=config.block_v,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )
    return out


def _fused(
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
    scale: float,
    config: FusedConfig | WritesConfig,
    ptxas: str = "",
) -> Tensor:
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    if isinstance(config, FusedConfig):
        kernel = _tree_gdn_fused_kernel
        cut = {"KC": config.chunk, "BK": config.block_k, "PRECISION": config.precision}
    elif config.tile:
        kernel, cut = _tree_gdn_tiles_kernel, {"BT": config.tile}
    else:
        kernel, cut = _tree_gdn_writes_kernel, {}
    kernel[(triton.cdiv(value_dim, config.block_v), heads, batch)](
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
        K=key_dim,
        V=value_dim,
        BQ=padded_rows(width),
        WORDS=bits.shape[2],
        BV=config.block_v,
        **cut,
        PTXAS=ptxas,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out


def padded_rows(width: int) -> int:
    """Rows of a tree of up to 64 nodes in one launch."""
    return max(16, int(triton.next_power_of_2(width)))


def verify_scratch(v: Tensor, key_dim: int) -> Scratch:
    """Buffers for `tree_gdn_verify_unchecked`: 2.8 MiB for one request of 64 nodes at HV 48, K 128.

    Without a request's place for trees of up to 32 nodes, which need none on any card.
    """
    batch, width, heads, _ = v.shape
    batch = batch if width > SMALL_WIDTH else 0
    columns = triton.cdiv(width, BLOCK_ROWS) * BLOCK_ROWS

    def buffer(*shape: int) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.float32, device=v.device)

    return Scratch(
        buffer(width, columns), buffer(width, key_dim), buffer(columns, BLOCK_ROWS), buffer(4, columns)
    )


def tree_gdn_scan_unchecked(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    walk: DepthFirst,
    out: Tensor,
    states: Tensor,
    scale: float,
    block_v: int = 16,
    num_warps: int = 2,
) -> Tensor:
    """The hot path in the scan form: one launch, no check, no allocation, no synchronisation.

    walk    `ddtree_kernels.ancestry.triton.depth_first`, one for every layer of a step
    states  `scan_scratch`, one for all layers
    """
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    block_v = min(block_v, triton.next_power_of_2(value_dim))
    _tree_gdn_scan_kernel[(triton.cdiv(value_dim, block_v), heads, batch)](
        a,
        b,
        A_log,
        dt_bias,
        q,
        k,
        v,
        state_pool,
        slots,
        *walk,
        out,
        states,
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
        HV=heads,
        K=key_dim,
        V=value_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=block_v,
        COPIES=states.shape[2],
        num_warps=num_warps,
    )
    return out


def scan_scratch(v: Tensor, key_dim: int) -> Tensor:
    """States that branches leave for their later children: float32[N, HV, Q // 2, V, K], one at least."""
    batch, width, heads, value_dim = v.shape
    copies = max(1, width // 2)
    return torch.empty(batch, heads, copies, value_dim, key_dim, dtype=torch.float32, device=v.device)


def key_chunk(key_dim: int, element_size: int) -> int:
    """Key channels that the solve takes at a time: what keeps a product's operands in registers."""
    channels: int = max(16, triton.next_power_of_2(key_dim))
    return min(channels, 64 if element_size == 2 else 16)


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
