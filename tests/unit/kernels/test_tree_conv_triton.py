from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_conv import tree_conv_naive
from ddtree_kernels.tree_conv.triton import tree_conv

from .cases import SHAPES, layer, relative_error


def arguments(case):
    return case.x, case.conv_pool, case.slots, case.weight, case.bias, case.parents


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 16, 40])
@pytest.mark.parametrize(
    ("window", "bias", "activation"), [(4, True, "silu"), (2, False, None), (3, True, None)]
)
def test_every_node_convolves_along_its_own_path(shape, width, window, bias, activation):
    case = layer(shape, width=width, window=window, bias=bias, slots=[4, -1], dtype=torch.float32)
    found = tree_conv(*arguments(case), activation=activation)
    assert relative_error(found, tree_conv_naive(*arguments(case), activation=activation)) < 1e-6


def test_strided_inputs_and_unset_root_parents_pass_without_copies():
    case = layer("random", batch=2, width=20, dtype=torch.float32)
    wide = torch.full((*case.x.shape[:2], case.x.shape[2] + 8), torch.nan)
    wide[..., 4:-4] = case.x
    parents = case.parents.int().clone()
    parents[:, 0] = 0
    pitched = torch.full((case.conv_pool.shape[0], 2, *case.conv_pool.shape[1:]), torch.nan)
    pitched[:, 1] = case.conv_pool
    strided = replace(
        case,
        x=wide[..., 4:-4],
        parents=parents.T.contiguous().T,
        conv_pool=pitched[:, 1],
        slots=case.slots.int(),
    )
    assert torch.equal(tree_conv(*arguments(strided)), tree_conv(*arguments(case)))


def test_half_precision_sums_in_float32():
    case = layer("random", width=20, dtype=torch.bfloat16)
    exact = case.to(torch.float64)
    found = tree_conv(*arguments(case))
    assert found.dtype == torch.bfloat16
    # The interpreter truncates to bfloat16 where the hardware rounds to nearest: twice the error.
    assert relative_error(found, tree_conv_naive(*arguments(exact))) < 6e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7, 4)}, "weight: found shape"),
        ({"weight": torch.zeros(96, 9)}, r"allowed are \[N, Q, C\] and \[C, 1..8\]"),
        ({"conv_pool": torch.zeros(5, 96, 4)}, "conv_pool: found shape"),
        ({"conv_pool": torch.zeros(5, 3, 96).transpose(1, 2)}, "conv_pool: found strides"),
        ({"x": torch.zeros(2, 96, 12).transpose(1, 2)}, "x: found strides"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    case = replace(layer("random", dtype=torch.float32), **change)
    with pytest.raises(KernelInputError, match=message):
        tree_conv(*arguments(case))
