"""SGLang's own recurrent pools and gated delta net backend on the CPU, with snapshots or with a stash.

Small layers, SGLang's real classes and, for snapshots, its real kernels in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from ddtree_engine.tree import layout
from ddtree_engine.tree.nodes import Tree
from ddtree_engine.tree.samples import random_tree

H, HV, K, V, TAPS = 1, 2, 16, 16, 4
CHANNELS = 2 * H * K + HV * V
LAYER_IDS = [0, 2]

RUNNING, SLOTS, PAGE = 3, 11, 1
DEPTH = 6


def cache_params(dtype=torch.float32, state_dtype=torch.float32):
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=HV * V,
        n_groups=H,
        num_heads=HV,
        head_dim=V,
        state_size=K,
        conv_kernel=TAPS,
    )
    kinds = Mamba2StateDType(conv=dtype, temporal=state_dtype)
    return Mamba2CacheParams(shape=shape, layers=LAYER_IDS, dtype=kinds)


def scatter_on_the_cpu(caches, slots, steps, track_slots, track_steps, src_indices_raw=None):
    """SGLang's commit of snapshots by its code for a CPU, for a function that takes a GPU's tensors only."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    for pool, kept in (
        (caches.temporal, caches.intermediate_ssm),
        (caches.conv[0], caches.intermediate_conv_window[0]),
    ):
        HybridLinearAttnBackend._scatter_speculative_state_with_mask(pool, kept, slots, steps)
        if track_slots is not None:
            HybridLinearAttnBackend._scatter_speculative_state_with_mask(pool, kept, track_slots, track_steps)


@dataclass
class Side:
    """One server's recurrent part: request table with pools, backend, layers."""

    pool: object
    backend: object
    layers: list
    target_worker: object


def make_side(monkeypatch, width, params, seed=0):
    """Pools with random states, a backend with its graph buffers, layers with random weights."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import spec_utils

    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda config: object())
    monkeypatch.setattr(hybrid, "scatter_mamba_states_after_mtp_verify", scatter_on_the_cpu)
    pool = memory_pool.HybridReqToTokenPool(
        size=RUNNING,
        mamba_size=SLOTS,
        mamba_spec_state_size=RUNNING,
        max_context_len=512,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=LAYER_IDS,
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=width,
        speculative_eagle_topk=2,
    )
    torch.manual_seed(seed)
    cache = pool.mamba_pool.mamba_cache
    cache.temporal.copy_(torch.randn(cache.temporal.shape))
    cache.conv[0].copy_(torch.randn(cache.conv[0].shape))
    triton = LinearAttnKernelBackend.TRITON
    runner = SimpleNamespace(
        server_args=SimpleNamespace(enable_mis=False),
        device="cpu",
        dtype=params.dtype.conv,
        is_draft_worker=False,
        req_to_token_pool=pool,
        token_to_kv_pool=None,
        linear_attn_backends=LinearAttnBackends(decode=triton, prefill=triton, verify=triton),
        model_config=None,
        model=None,
    )
    linear = GDNAttnBackend(runner)
    linear.init_cuda_graph_state(RUNNING, RUNNING * width)
    backend = hybrid.HybridLinearAttnBackend.__new__(hybrid.HybridLinearAttnBackend)
    backend.linear_attn_backend = linear
    runner.attn_backend = backend
    layers = [
        RadixLinearAttention(
            layer_id=layer_id,
            num_q_heads=H,
            num_k_heads=H,
            num_v_heads=HV,
            head_q_dim=K,
            head_k_dim=K,
            head_v_dim=V,
            conv_weights=torch.randn(CHANNELS, TAPS).to(params.dtype.conv),
            bias=None,
            activation="silu",
            A_log=torch.randn(HV),
            dt_bias=torch.randn(HV),
        )
        for layer_id in LAYER_IDS
    ]
    return Side(pool, linear, layers, SimpleNamespace(model_runner=runner))


@dataclass
class Pass:
    """A verify pass's inputs: trees and, for every layer, what its projections gave."""

    width: int
    trees: list
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    inputs: list

    @property
    def parents(self):
        return torch.from_numpy(np.stack([tree.parents for tree in self.trees]))


def make_pass(width, requests, seq_lens, dtype=torch.float32, seed=0, padded=None):
    """Random trees for some requests; inputs for `padded` rows of a batch."""
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(len(requests)):
        parents, depths = random_tree(rng, width, DEPTH)
        trees.append(
            Tree(np.zeros(width, np.int64), parents, depths, np.zeros(width), np.zeros(width, np.int64))
        )
    torch.manual_seed(seed + 100)
    rows = (padded or len(requests)) * width
    inputs = []
    for _ in LAYER_IDS:
        # As the model has them: columns of wider projections.
        projected = torch.randn(rows, CHANNELS + HV * V).to(dtype)
        gates = torch.randn(rows, 2 * HV).to(dtype)
        inputs.append((projected[:, :CHANNELS], gates[:, HV:], gates[:, :HV]))
    return Pass(width, trees, torch.tensor(requests), torch.tensor(seq_lens), inputs)


def run_verify(side, one, padded=None):
    """The pass through the backend's layers; `padded` rows as a graph's replay has them, None eager."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    links = [layout.links(tree) for tree in one.trees]
    first, following = (torch.from_numpy(np.stack([pair[i] for pair in links])) for i in (0, 1))
    spec = SimpleNamespace(
        draft_token_num=one.width,
        retrieve_next_token=first,
        retrieve_next_sibling=following,
        ragged_verify_layout=None,
    )
    recurrent = getattr(side.pool.mamba_pool, "ddtree", None)
    if recurrent is not None:
        recurrent.stash.set_trees(one.parents)
    count = len(one.trees)
    rows = padded or count
    table = torch.zeros(rows, dtype=one.req_pool_indices.dtype)
    table[:count] = one.req_pool_indices
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=rows,
        input_ids=torch.zeros(rows * one.width, dtype=torch.int64),
        req_pool_indices=table,
        seq_lens=one.seq_lens,
        out_cache_loc=None,
        seq_lens_sum=0,
        spec_info=spec,
    )
    if padded is None:
        side.backend.forward_metadata = side.backend._forward_metadata(batch)
    else:
        lens = torch.full((rows,), 1)
        lens[:count] = one.seq_lens + one.width
        side.backend.forward_metadata = side.backend._replay_metadata(
            rows, table, ForwardMode.TARGET_VERIFY, spec, lens
        )
    outputs = []
    for layer, (x, a, b) in zip(side.layers, one.inputs, strict=True):
        # The keywords are those of SGLang's hybrid backend.
        outputs.append(
            side.backend.forward_extend(
                q=None,
                k=None,
                v=None,
                layer=layer,
                forward_batch=batch,
                save_kv_cache=True,
                mixed_qkv=x.clone(),
                a=a,
                b=b,
            )
        )
    return torch.stack(outputs)


def accepted(one, counts):
    """(accept_index int32[N, DEPTH], accept_lens int32[N]): the first `counts` nodes on a deepest path."""
    index = torch.full((len(one.trees), DEPTH), -1, dtype=torch.int32)
    for row, (tree, count) in enumerate(zip(one.trees, counts, strict=True)):
        at, path = int(np.argmax(tree.depths)), []
        while at >= 0:
            path.append(at)
            at = int(tree.parents[at])
        path = path[::-1][:count]
        index[row, : len(path)] = torch.tensor(path) + row * one.width
    return index, (index >= 0).sum(1).to(torch.int32)


def run_commit(side, one, index, lens, track_slots=None):
    """SGLang's commit, as its verify step calls it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative import eagle_worker_common

    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=one.req_pool_indices,
        seq_lens=one.seq_lens,
        mamba_track_indices=track_slots,
        tree_cache=SimpleNamespace(page_size=PAGE),
    )
    eagle_worker_common.commit_mamba_states_after_verify(side.target_worker, batch, lens, index, one.width)
