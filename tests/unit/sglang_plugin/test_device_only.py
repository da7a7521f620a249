"""What a step does on the card never looks at a value on the host: shapes and devices are enough to run it.

Tensors on torch's device `meta` have no values: whatever asks for one (a host synchronisation on a GPU, an
error inside a CUDA graph) raises, and so does arithmetic with a tensor that was left on the CPU.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin import sampling
from ddtree_engine.sglang_plugin.draft_sampler import Head, TreeDraftSampler
from ddtree_engine.sglang_plugin.metrics import StepCounters, StepOutcome
from ddtree_engine.sglang_plugin.penalties import Penalties
from ddtree_engine.sglang_plugin.tree_build import TreeBuilder, encode
from ddtree_engine.tree.build import Builder
from ddtree_engine.tree.calibration import Calibration, EdgeTable

REQUESTS, BLOCK, TOPK, WIDTH, HIDDEN, VOCABULARY = 3, 8, 4, 16, 32, 64


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape, dtype=torch.int64):
    return empty(*shape, dtype=dtype)


@pytest.fixture
def sampled():
    def sample(builder):
        side = EdgeTable(np.zeros(BLOCK - 1, np.float32), np.zeros(TOPK, np.float32), np.float32(1))
        calibration = Calibration(BLOCK, TOPK, -12.0, side, side) if builder is Builder.CALIBRATED else None
        head = Head(empty(VOCABULARY + 64, HIDDEN, dtype=torch.bfloat16), VOCABULARY, 0)
        trees = TreeBuilder(BLOCK, TOPK, WIDTH - 1, builder, calibration, "meta")
        sampler = TreeDraftSampler(head, trees, BLOCK, max_batch=8)
        sampler(empty(REQUESTS * BLOCK, HIDDEN, dtype=torch.bfloat16), ints(REQUESTS * BLOCK))
        return sampler

    return sample


@pytest.mark.parametrize("builder", list(Builder))
def test_the_drafters_candidates_trees_and_their_encoding(builder, sampled):
    trees = sampled(builder).trees(REQUESTS)
    for part in encode(trees.parents):
        assert part.device.type == "meta"
        # SGLang's tree kernel wants these strides, also of a batch of one.
        assert part.stride() == (part.shape[1], 1)


def test_the_counters_of_a_step(sampled):
    sampler = sampled(Builder.BEST_FIRST)
    outcome = StepOutcome(
        tree=sampler.trees(REQUESTS),
        spine=sampler.ids[:REQUESTS, :, 0],
        path=ints(REQUESTS, BLOCK),
        accepted=ints(REQUESTS),
        bonus=ints(REQUESTS),
        parents_seen=ints(REQUESTS, WIDTH, dtype=torch.int32),
    )
    counters = StepCounters(BLOCK, "cpu")
    counters._totals = counters._totals.to("meta")
    chain = counters.add(outcome)
    assert (chain.device.type, chain.dtype) == ("meta", torch.int32)


def test_penalties_of_every_node_and_their_counting(sampled):
    tree = sampled(Builder.BEST_FIRST).trees(REQUESTS)
    parameters = SimpleNamespace(
        frequency_penalty=0.5,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        min_new_tokens=30,
        stop_token_ids=[3, 4],
    )
    requests = [
        SimpleNamespace(
            sampling_params=parameters,
            origin_input_ids=[1, 2],
            output_ids=[5] * row,
            kv=SimpleNamespace(req_pool_idx=row),
            eos_token_ids={2},
            tokenizer=None,
        )
        for row in range(REQUESTS)
    ]
    wide = (empty(REQUESTS, VOCABULARY), empty(REQUESTS, VOCABULARY))
    info = SimpleNamespace(acc_additive_penalties=wide[0], acc_scaling_penalties=wide[1])
    batch = SimpleNamespace(
        reqs=requests, sampling_info=info, seq_lens=ints(REQUESTS), req_pool_indices=ints(REQUESTS)
    )
    penalties = Penalties(REQUESTS, VOCABULARY, "meta")
    penalties.prefill(batch)
    for step in (penalties.step(batch, tree, BLOCK), penalties.step(batch, tree.first(WIDTH // 2), BLOCK)):
        step.apply(empty(step.tree.tokens.numel(), VOCABULARY))
        step.commit(ints(REQUESTS, BLOCK, dtype=torch.int32))


def test_sampling_every_node_with_all_filters_and_a_bias():
    rows = REQUESTS * WIDTH
    logits = empty(rows, VOCABULARY, dtype=torch.bfloat16)
    info = SimpleNamespace(logit_bias=empty(REQUESTS, VOCABULARY))
    sampling.adjust_logits(logits, info, WIDTH, None)
    filters = {"top_ks": ints(rows, dtype=torch.int32), "top_ps": empty(rows), "min_ps": empty(rows)}
    for most in (None, 20):
        drawn = sampling.sample_rows(logits, empty(rows, 1), **filters, most=most)
        assert (drawn.device.type, drawn.dtype, drawn.shape) == ("meta", torch.int64, (rows,))


def test_a_value_that_is_asked_for_is_seen():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.bincount(ints(3))
    with pytest.raises(RuntimeError):
        int(ints(1)[0])
    with pytest.raises(RuntimeError):
        empty(3) + torch.ones(3)
