"""SGLang's own recurrent tree kernels against the plain references of `ddtree_kernels`, in the interpreter.

The plugin's correctness on hybrid models rests on these two kernels forking their state at the parent row.
"""

import numpy as np
import pytest
import torch
from ddtree_engine.tree import layout
from ddtree_engine.tree.nodes import Tree
from ddtree_engine.tree.samples import random_tree
from ddtree_kernels.tree_conv.naive import tree_conv_naive
from ddtree_kernels.tree_gdn.gates import recurrence
from ddtree_kernels.tree_gdn.naive import tree_gdn_naive

H, HV, K, V, TAPS = 1, 2, 16, 16, 4
CHANNELS = 2 * H * K + HV * V
REQUESTS, SLOTS = 2, 5


@pytest.fixture
def kernels(published, monkeypatch):
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as delta
    from sglang.kernels.ops.mamba import causal_conv1d_triton as conv

    for module in (delta, conv):
        monkeypatch.setattr(module, "is_arch_support_pdl", lambda: False)
    return conv.causal_conv1d_update, delta.fused_sigmoid_gating_delta_rule_update


@pytest.fixture(params=[1, 3])
def case(request):
    """Random inputs of two requests with different trees."""
    rng = np.random.default_rng(request.param)
    width = (7, 8, 12)[request.param - 1]
    torch.manual_seed(request.param)
    parents, first, sibling = [], [], []
    for _ in range(REQUESTS):
        tree_parents, depths = random_tree(rng, width, 6)
        tree = Tree(
            np.zeros(width, np.int64), tree_parents, depths, np.zeros(width), np.zeros(width, np.int64)
        )
        child, following = layout.links(tree)
        parents.append(tree_parents)
        first.append(child)
        sibling.append(following)

    def ints(rows):
        return torch.from_numpy(np.stack(rows))

    return {
        "width": width,
        "parents": ints(parents),
        "first": ints(first),
        "sibling": ints(sibling),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
        "rows": torch.tensor([0, 1], dtype=torch.int32),
    }


def poisoned(*shape):
    return torch.full(shape, torch.nan)


def test_the_convolution_runs_through_ancestors_and_rebuilds_the_parents(kernels, case):
    convolve, _ = kernels
    width = case["width"]
    x = torch.randn(REQUESTS, CHANNELS, width)
    pool = torch.randn(SLOTS, CHANNELS, TAPS - 1)
    weight, bias = torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
    windows = poisoned(REQUESTS, width, CHANNELS, TAPS - 1)
    rebuilt = torch.full((REQUESTS, width), -7, dtype=torch.int64)
    out = convolve(
        x.clone(),
        pool.clone(),
        weight,
        bias,
        "silu",
        conv_state_indices=case["slots"],
        intermediate_conv_window=windows,
        intermediate_state_indices=case["rows"],
        retrieve_next_token=case["first"],
        retrieve_next_sibling=case["sibling"],
        retrieve_parent_token=rebuilt,
    )
    expected = tree_conv_naive(x.transpose(1, 2), pool, case["slots"], weight, bias, case["parents"])
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
    assert rebuilt[:, 1:].tolist() == case["parents"][:, 1:].tolist()
    for request in range(REQUESTS):
        for node in range(width):
            path, at = [], node
            while at >= 0:
                path.append(x[request, :, at])
                at = int(case["parents"][request, at])
            history = torch.cat([pool[case["slots"][request]], torch.stack(path[::-1], dim=1)], dim=1)
            torch.testing.assert_close(windows[request, node], history[:, -(TAPS - 1) :])


def test_the_delta_rule_forks_the_parents_state(kernels, case):
    _, update = kernels
    width, tokens = case["width"], REQUESTS * case["width"]
    q, k = torch.randn(1, tokens, H, K), torch.randn(1, tokens, H, K)
    v = torch.randn(1, tokens, HV, V)
    a, b = torch.randn(tokens, HV), torch.randn(tokens, HV)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    pool = torch.randn(SLOTS, HV, V, K)
    states = poisoned(REQUESTS, width, HV, V, K)
    before = pool.clone()
    out = update(
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=q,
        k=k,
        v=v,
        b=b,
        initial_state_source=pool,
        initial_state_indices=case["slots"],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, tokens + 1, width, dtype=torch.int32),
        disable_state_update=True,
        intermediate_states_buffer=states,
        intermediate_state_indices=case["rows"],
        cache_steps=width,
        retrieve_parent_token=case["parents"],
    )

    def rows(tensor):
        return tensor.view(REQUESTS, width, *tensor.shape[2 if tensor.dim() == 4 else 1 :])

    inputs = recurrence(rows(a), rows(b), A_log, dt_bias, rows(q), rows(k), rows(v), pool, case["slots"])
    expected, expected_states = tree_gdn_naive(*inputs, case["parents"])
    torch.testing.assert_close(rows(out), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool, before)


def test_without_parents_rows_share_the_state_of_the_row_before(kernels, case):
    """What mode unsafe does, and why it is wrong on every tree that branches."""
    _, update = kernels
    width, tokens = case["width"], REQUESTS * case["width"]
    q, k, v = torch.randn(1, tokens, H, K), torch.randn(1, tokens, H, K), torch.randn(1, tokens, HV, V)
    a, b = torch.randn(tokens, HV), torch.randn(tokens, HV)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    pool = torch.randn(SLOTS, HV, V, K)
    shared = {
        "A_log": A_log,
        "a": a,
        "dt_bias": dt_bias,
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "q": q,
        "k": k,
        "v": v,
        "b": b,
        "initial_state_source": pool,
        "initial_state_indices": case["slots"],
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.arange(0, tokens + 1, width, dtype=torch.int32),
        "disable_state_update": True,
        "intermediate_state_indices": case["rows"],
        "cache_steps": width,
    }
    chain = (torch.arange(width) - 1).expand(REQUESTS, width).contiguous()
    unsafe = update(**shared, intermediate_states_buffer=poisoned(REQUESTS, width, HV, V, K))
    as_chain = update(
        **shared,
        intermediate_states_buffer=poisoned(REQUESTS, width, HV, V, K),
        retrieve_parent_token=chain,
    )
    forked = update(
        **shared,
        intermediate_states_buffer=poisoned(REQUESTS, width, HV, V, K),
        retrieve_parent_token=case["parents"],
    )
    torch.testing.assert_close(unsafe, as_chain, rtol=1e-4, atol=1e-5)
    assert (unsafe - forked).abs().max() > 1e-2
