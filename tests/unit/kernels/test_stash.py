"""The stash is what went in: row by row, from views with any pitch, and nothing beside it."""

import pytest
import torch
from ddtree_kernels.commit.stash import stash
from ddtree_kernels.errors import KernelInputError

ROWS = 3


def inputs(channels, heads, dtype):
    projected = torch.randn(ROWS, channels + 7).to(dtype)
    gates = torch.randn(ROWS, 2 * heads).to(dtype)
    return projected[:, :channels], gates[:, heads:], gates[:, :heads]


@pytest.mark.parametrize(("channels", "heads"), [(80, 2), (1024, 48), (2500, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_kept_and_nothing_else_is_written(channels, heads, dtype):
    given = inputs(channels, heads, dtype)
    around = [torch.full((ROWS + 2, one.shape[1] + 3), torch.nan, dtype=dtype) for one in given]
    kept = [one[1:-1, :-3] for one in around]
    stash(*given, *kept)
    for one, copy, frame in zip(given, kept, around, strict=True):
        assert torch.equal(copy, one)
        assert frame[[0, -1]].isnan().all()
        assert frame[:, -3:].isnan().all()


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (0, lambda one: one[0], "x, a: found shapes"),
        (0, lambda one: one.double(), "kept_x: found torch.float32"),
        (2, lambda one: one[:, :-1], "b: found shape"),
        (5, lambda one: one[:-1], "kept_b: found shape"),
        (3, lambda one: one.t().contiguous().t(), "kept_x: found strides"),
    ],
)
def test_what_does_not_fit_is_named(place, change, said):
    given = inputs(80, 2, torch.float32)
    tensors = [*given, *(torch.empty_like(one) for one in given)]
    tensors[place] = change(tensors[place])
    with pytest.raises(KernelInputError, match=said):
        stash(*tensors)
