"""The delta rule's torch references against one decode step after the other, and against each other."""

from __future__ import annotations

import pytest
import torch
from ddtree_kernels.ancestry import ancestor_mask, chain_parents
from ddtree_kernels.tree_gdn import (
    gdn_step,
    recurrence,
    tree_gdn_naive,
    tree_gdn_verify_naive,
    tree_gdn_verify_wy,
    tree_gdn_wy,
)

from .cases import SHAPES, layer, path_to, relative_error

F64, F32 = 1e-12, 1e-5


def decode_along(inputs, request, path):
    """The states after each node of a path, by plain decode steps on one request."""
    groups = inputs.v.shape[2] // inputs.k.shape[2]
    state, states, outputs = inputs.state[request], [], []
    for node in path:
        q, k = (x[request, node].repeat_interleave(groups, dim=0) for x in (inputs.q, inputs.k))
        v, g, beta = (x[request, node] for x in (inputs.v, inputs.g, inputs.beta))
        state, out = gdn_step(q, k, v, g, beta, state)
        states.append(state)
        outputs.append(out)
    return states, outputs


def test_one_decode_step_is_the_gated_delta_rule():
    """Against the textbook matrices: S (I - beta k k^T) exp(g) + beta v k^T."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 5, dtype=torch.float64)
    S = torch.randn(1, 5, 5, dtype=torch.float64)
    g, beta = torch.tensor([[-0.3], [0.7]], dtype=torch.float64)
    new, out = gdn_step(q, k, v, g, beta, S)
    forget = torch.eye(5, dtype=torch.float64) - beta * k[0, :, None] * k[0, None, :]
    expected = g.exp() * S[0] @ forget + beta * v[0, :, None] * k[0, None, :]
    assert torch.allclose(new[0], expected, rtol=0, atol=1e-14)
    assert torch.allclose(out[0], expected @ q[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_equals_decoding_its_own_path(shape):
    case = layer(shape, slots=[4, -1])
    inputs = recurrence(*case.verify_args(case.x)[:-1])
    assert not inputs.state[1].any(), "a request without a slot starts from nothing"
    out, states = tree_gdn_naive(*inputs, case.parents)
    for request in range(2):
        for node in range(case.parents.shape[1]):
            path = path_to(case.parents[request], node)
            expected_states, expected_outputs = decode_along(inputs, request, path)
            assert torch.allclose(states[request, node], expected_states[-1], rtol=0, atol=1e-12)
            assert torch.allclose(out[request, node], expected_outputs[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64), (torch.float32, F32)])
@pytest.mark.parametrize("width", [1, 7, 33])
def test_wy_equals_forked_states(shape, dtype, bound, width):
    case = layer(shape, width=width, seed=width)
    expected = tree_gdn_verify_naive(*case.verify_args(case.x))
    low = case.to(dtype)
    assert relative_error(tree_gdn_verify_wy(*low.verify_args(low.x)), expected) < bound


@pytest.mark.parametrize("shape", ["random", "chain"])
@pytest.mark.parametrize("decay", [-1e-3, -1.0, -20.0, -80.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64), (torch.float32, F32)])
def test_wy_holds_at_extreme_decays(shape, decay, dtype, bound):
    case = layer(shape, width=64, decay=decay)
    expected = tree_gdn_verify_naive(*case.verify_args(case.x))
    low = case.to(dtype)
    assert relative_error(tree_gdn_verify_wy(*low.verify_args(low.x)), expected) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64), (torch.float32, F32)])
def test_wy_keeps_weak_decays_that_follow_strong_ones(dtype, bound):
    """Log decays from the prefix reach -4000 here; a difference of two of them would lose the weak gates."""
    case = layer("chain", width=64)
    inputs = recurrence(*case.verify_args(case.x)[:-1])
    g = torch.full_like(inputs.g, -0.01)
    g[:, :32] = -125.0
    expected, states = tree_gdn_naive(*inputs._replace(g=g), case.parents)
    low = [x.to(dtype) for x in inputs._replace(g=g)]
    out, state = tree_gdn_wy(*low, case.parents, leaf=torch.tensor([63, 63]))
    assert relative_error(out, expected) < bound
    assert relative_error(state, states[:, 63]) < bound


@pytest.mark.parametrize("shape", ["random", "chain"])
@pytest.mark.parametrize("correlation", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64), (torch.float32, F32)])
def test_wy_holds_on_correlated_keys_with_weak_decay(shape, correlation, dtype, bound):
    """Where an inverse by repeated squaring blows up."""
    case = layer(shape, width=64, decay=-0.01, correlation=correlation)
    expected = tree_gdn_verify_naive(*case.verify_args(case.x))
    low = case.to(dtype)
    assert relative_error(tree_gdn_verify_wy(*low.verify_args(low.x)), expected) < bound


@pytest.mark.parametrize("shape", SHAPES)
def test_wy_rebuilds_the_state_of_any_node(shape):
    case = layer(shape)
    inputs = recurrence(*case.verify_args(case.x)[:-1])
    _, states = tree_gdn_naive(*inputs, case.parents)
    for node in range(case.parents.shape[1]):
        leaf = torch.tensor([node, case.parents.shape[1] - 1 - node])
        _, state = tree_gdn_wy(*inputs, case.parents, leaf=leaf)
        assert relative_error(state, states[torch.arange(2), leaf]) < F64


def test_a_given_mask_replaces_the_parents():
    case = layer("random")
    given = tree_gdn_verify_wy(*case.verify_args(case.x)[:-1], None, mask=ancestor_mask(case.parents))
    assert torch.equal(given, tree_gdn_verify_wy(*case.verify_args(case.x)))


@pytest.mark.parametrize("form", [tree_gdn_verify_naive, tree_gdn_verify_wy])
def test_a_sibling_branch_leaves_the_others_alone(form):
    case = layer("star")
    before = form(*case.verify_args(case.x))
    case.x[:, 5] += 1.0
    after = form(*case.verify_args(case.x))
    same = [row for row in range(12) if row != 5]
    assert torch.equal(before[:, same], after[:, same])
    assert not torch.equal(before[:, 5], after[:, 5])


@pytest.mark.parametrize("form", [tree_gdn_verify_naive, tree_gdn_verify_wy])
def test_row_order_parents_leak_between_siblings(form):
    """The unsafe ablation: chain parents on a tree give other outputs from the second sibling on."""
    case = layer("star")
    *args, parents = case.verify_args(case.x)
    safe, unsafe = form(*args, parents), form(*args, chain_parents(2, 12))
    assert torch.allclose(safe[:, :2], unsafe[:, :2], rtol=0, atol=1e-12)
    assert (safe[:, 2:] - unsafe[:, 2:]).abs().amin(dim=(0, 2, 3)).min() > 1e-9


@pytest.mark.parametrize("form", [tree_gdn_verify_naive, tree_gdn_verify_wy])
def test_verify_reads_the_pool_only(form):
    case = layer("random")
    pool = case.state_pool.clone()
    form(*case.verify_args(case.x))
    assert torch.equal(pool, case.state_pool)


def test_half_precision_inputs_give_half_precision_outputs_from_float32_sums():
    case = layer("random").to(torch.bfloat16)
    out = tree_gdn_verify_wy(*case.verify_args(case.x))
    exact = case.to(torch.float64)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, tree_gdn_verify_naive(*exact.verify_args(exact.x))) < 4e-3
