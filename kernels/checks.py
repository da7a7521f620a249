"""Checks shared by the wrappers: shapes and strides, with the tensor's name in the error."""

from __future__ import annotations

from ddtree_kernels.errors import KernelInputError
from torch import Tensor


def expect_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise `KernelInputError` unless an optional tensor has this shape."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise KernelInputError(f"{name}: found shape {list(tensor.shape)}, allowed is {list(shape)}")


def expect_dense(name: str, tensor: Tensor | None, dimensions: int) -> None:
    """Raise `KernelInputError` unless the last `dimensions` dimensions are contiguous."""
    if tensor is None:
        return
    step = 1
    for size, stride in zip(tensor.shape[::-1][:dimensions], tensor.stride()[::-1], strict=False):
        if size > 1 and stride != step:
            raise KernelInputError(
                f"{name}: found strides {list(tensor.stride())}, "
                f"allowed are contiguous last {dimensions} dimensions"
            )
        step *= size
