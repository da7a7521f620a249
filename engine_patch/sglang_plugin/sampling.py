"""Acceptance above T=0: sample one token at every node, then walk.

A node's row is the target's distribution after the node's own ancestors. One token is drawn at every node
from its own row and the walk follows the child that carries it, so each emitted token was drawn from the
target's distribution given what was emitted before it: lossless, whatever the tree (the walk that DDTree
uses, arXiv 2604.12989). Temperature, top-k, top-p and min-p act on a row as in plain sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def sample_rows(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    noise: Tensor | None = None,
    seeded: tuple[Tensor, Tensor] | None = None,
    most: int | None = None,
) -> Tensor:
    """int64[n], one token a row.

    logits        float[n, V];  temperatures  float[n, 1] (> 0)
    top_ks        int[n], candidates that may be drawn;  top_ps  float[n];  min_ps  float[n], share of the
                  best token's probability below which a token is dropped; None = filter off
    noise         float[n, V], exponentially distributed: passed in by tests
    seeded        (seeds int[n], positions int[n]): the draw depends on these and the token only
    most          no entry of top_ks is above it: spares sorting the vocabulary
    """
    probs = torch.softmax(logits.float() / temperatures, dim=-1)
    tokens = None
    if top_ks is not None or top_ps is not None or min_ps is not None:
        if most is not None and most < probs.shape[-1]:
            probs, tokens = torch.topk(probs, most, dim=-1)
        else:
            probs, tokens = probs.sort(dim=-1, descending=True)
        before = probs.cumsum(-1) - probs
        drop = torch.zeros_like(probs, dtype=torch.bool)
        if top_ks is not None:
            drop |= torch.arange(probs.shape[-1], device=probs.device) >= top_ks[:, None]
        if top_ps is not None:
            drop |= before > top_ps[:, None]
        if min_ps is not None:
            drop |= probs < probs[:, :1] * min_ps[:, None]
        probs = probs.masked_fill(drop, 0.0)
    chosen = _seeded_choice(probs, tokens, logits.shape[-1], *seeded) if seeded else _choice(probs, noise)
    return chosen if tokens is None else tokens.gather(1, chosen[:, None])[:, 0]


def _choice(probs: Tensor, noise: Tensor | None) -> Tensor:
    # The largest p/e with e exponential is a draw from p: no host synchronisation, unlike torch.multinomial.
    if noise is None:
        noise = torch.empty_like(probs).exponential_(1.0).clamp_min_(torch.finfo(probs.dtype).tiny)
    return (probs / noise).argmax(dim=-1)


def _seeded_choice(
    probs: Tensor, tokens: Tensor | None, vocabulary: int, seeds: Tensor, positions: Tensor
) -> Tensor:
    from sglang.srt.layers.sampler import multinomial_with_seed

    if tokens is not None:
        # Back in vocabulary order, so that a draw does not depend on the filters' order of ties.
        probs = probs.new_zeros(len(probs), vocabulary).scatter_(1, tokens, probs)
    chosen: Tensor = multinomial_with_seed(torch.log(probs), seeds, positions)[:, 0]
    if tokens is None:
        return chosen
    return (tokens == chosen[:, None]).int().argmax(dim=-1)


def sample_and_walk(
    verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's (predict int32[N*Q], accept_lens int32[N], accept_index int32[N, D]) for a sampled batch."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
    from sglang.srt.runtime_context import get_parallel

    info = batch.sampling_info
    width = verify_input.draft_token_num
    requests = len(batch.seq_lens)
    logits = logits_output.next_token_logits
    adjust_logits(logits, info, width, grammar_mask)

    def per_node(values: Tensor) -> Tensor:
        return values.repeat_interleave(width, dim=0)

    seeds = info.sampling_seed
    target = sample_rows(
        logits,
        per_node(info.temperatures),
        per_node(info.top_ks) if info.need_top_k_sampling else None,
        per_node(info.top_ps) if info.need_top_p_sampling else None,
        per_node(info.min_ps) if info.need_min_p_sampling else None,
        seeded=None if seeds is None else (per_node(seeds), verify_input.positions),
        most=info.max_top_k if info.need_top_k_sampling else None,
    )
    group = get_parallel().tp_group
    if group.world_size > 1:
        # Ranks' logits may differ in the last bit, their draws then differ altogether.
        group.broadcast(target, src=0)
    predict = torch.zeros(requests * width, dtype=torch.int32, device=logits.device)
    accept_index = torch.full(
        (requests, verify_input.max_tree_depth), -1, dtype=torch.int32, device=logits.device
    )
    drafts = torch.empty(requests, dtype=torch.int32, device=logits.device)
    predict, accept_index, drafts = verify_tree_greedy_func(
        predicts=predict,
        accept_index=accept_index,
        accept_token_num=drafts,
        candidates=verify_input.draft_token.reshape(requests, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=target.reshape(requests, width),
        topk=verify_input.tree_topk,
    )
    return predict, drafts + 1, accept_index


def adjust_logits(logits: Tensor, info: Any, width: int, grammar_mask: Any) -> None:
    """Apply a request's bias to all of its Q rows, and the grammar per node, in place."""
    if info.logit_bias is not None:
        rows = logits.view(-1, width, logits.shape[-1])
        rows += info.logit_bias[:, None]
    if grammar_mask is not None:
        grammar_mask.apply(logits)


@contextmanager
def without_stock_penalties(info: Any) -> Iterator[None]:
    """SGLang's own penalties, the same for all nodes and behind the output, are not added inside."""
    saved = info.acc_additive_penalties, info.acc_scaling_penalties
    info.acc_additive_penalties = info.acc_scaling_penalties = None
    try:
        yield
    finally:
        info.acc_additive_penalties, info.acc_scaling_penalties = saved
