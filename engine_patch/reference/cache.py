"""What one request keeps between steps: attention keys and values, recurrent states, convolution windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ddtree_engine.reference.config import DrafterConfig, TargetConfig
from torch import Tensor

GROW = 256


@dataclass
class TargetCache:
    """Target state after `length` committed tokens.

    keys, values  [full_layers, kv_heads, capacity, head_dim]; rows past `length` are scratch
    states        float32 [gdn_layers, value_heads, value_dim, key_dim]
    windows       [gdn_layers, conv_kernel - 1, channels], convolution inputs of the last tokens, oldest first
    """

    keys: Tensor
    values: Tensor
    states: Tensor
    windows: Tensor
    length: int = 0

    @classmethod
    def empty(cls, config: TargetConfig, capacity: int, dtype: torch.dtype) -> TargetCache:
        """A cache with no token in it and room for `capacity`."""
        full, linear = len(config.full_layers), len(config.linear_layers)
        shape = (full, config.num_kv_heads, capacity, config.head_dim)
        return cls(
            keys=torch.zeros(shape, dtype=dtype),
            values=torch.zeros(shape, dtype=dtype),
            states=torch.zeros(linear, config.value_heads, config.value_head_dim, config.key_head_dim),
            windows=torch.zeros(linear, config.conv_kernel - 1, config.conv_dim, dtype=dtype),
        )

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows past `length`."""
        self.keys, self.values = _room(self.keys, self.length + rows), _room(self.values, self.length + rows)

    def keep(self, path: Tensor) -> None:
        """Compact the rows of the accepted nodes, int64 [P], to the front of the scratch rows."""
        start, stop = self.length, self.length + len(path)
        rows = path + start
        self.keys[:, :, start:stop] = self.keys[:, :, rows]
        self.values[:, :, start:stop] = self.values[:, :, rows]


@dataclass
class DrafterCache:
    """The drafter's keys and values of the committed tokens, [layers, kv_heads, capacity, head_dim] each.

    Rows past `length` are scratch for the block that is being drafted.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, config: DrafterConfig, capacity: int, dtype: torch.dtype) -> DrafterCache:
        """A cache with no token in it and room for `capacity`."""
        shape = (len(config.layer_types), config.num_kv_heads, capacity, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows past `length`."""
        self.keys, self.values = _room(self.keys, self.length + rows), _room(self.values, self.length + rows)


def _room(rows: Tensor, needed: int) -> Tensor:
    if needed <= rows.shape[2]:
        return rows
    bigger = rows.new_zeros(*rows.shape[:2], needed + GROW, rows.shape[3])
    bigger[:, :, : rows.shape[2]] = rows
    return bigger
