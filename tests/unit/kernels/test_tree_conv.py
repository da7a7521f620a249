from __future__ import annotations

import pytest
import torch
from ddtree_kernels.ancestry import window_index
from ddtree_kernels.tree_conv import commit_window_naive, tree_conv_naive

from .cases import SHAPES, layer, path_to, relative_error


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_every_node_equals_a_convolution_over_its_own_path(shape, window, bias, activation):
    case = layer(shape, window=window, bias=bias, slots=[4, -1])
    out = tree_conv_naive(
        case.x, case.conv_pool, case.slots, case.weight, case.bias, case.parents, activation=activation
    )
    for request, slot in enumerate(case.slots.tolist()):
        carried = case.conv_pool[slot] if slot >= 0 else torch.zeros_like(case.conv_pool[0])
        for node in range(case.parents.shape[1]):
            inputs = case.x[request, path_to(case.parents[request], node)].T
            row = torch.nn.functional.conv1d(
                torch.cat([carried, inputs], dim=-1)[None],
                case.weight[:, None],
                case.bias,
                groups=case.weight.shape[0],
            )[0, :, -1]
            expected = torch.nn.functional.silu(row) if activation else row
            assert torch.allclose(out[request, node], expected, rtol=0, atol=1e-12)


def test_an_index_computed_once_serves_every_layer():
    case = layer("random")
    args = (case.x, case.conv_pool, case.slots, case.weight, case.bias, case.parents)
    assert torch.equal(tree_conv_naive(*args, index=window_index(case.parents, 4)), tree_conv_naive(*args))


def test_half_precision_sums_in_float32():
    case = layer("random").to(torch.bfloat16)
    out = tree_conv_naive(case.x, case.conv_pool, case.slots, case.weight, case.bias, case.parents)
    exact = case.to(torch.float64)
    expected = tree_conv_naive(exact.x, exact.conv_pool, exact.slots, exact.weight, exact.bias, exact.parents)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < 3e-3


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_window_moves_past_the_accepted_nodes_only(count):
    case = layer("chain", slots=[3, -1])
    pool = case.conv_pool.clone()
    path = torch.tensor([[0, 2, 3, 7, 8], [0, 1, 2, 3, 4]])
    commit_window_naive(case.x, case.conv_pool, case.slots, path, torch.tensor([count, 5]))
    expected = torch.cat([pool[3], case.x[0, path[0, :count]].T], dim=-1)[:, -3:]
    assert torch.equal(case.conv_pool[3], expected)
    others = [row for row in range(pool.shape[0]) if row != 3]
    assert torch.equal(case.conv_pool[others], pool[others]), "a padded request or a bystander was written"
