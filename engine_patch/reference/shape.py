"""What a pass over several tokens needs to know about who follows whom, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from ddtree_engine.tree import Tree, ancestor_mask
from ddtree_kernels.ancestry import chain_parents, window_index
from torch import Tensor


@dataclass(frozen=True)
class PassShape:
    """Rows of one pass.

    depths     int64 [Q], distance from row 0, added to the prefix length for positions
    bias       float32 [Q, Q], 0 where a row sees a row and -inf where not (full attention)
    parents    int64 [1, Q], predecessor rows of the recurrent layers, -1 for row 0
    mask       bool [1, Q, Q], ancestors (and self) by `parents`
    windows    int64 [W, Q], convolution windows by `parents`: rows of the carried inputs and then the Q rows
    is_chain   recurrent layers take every row from the one before
    """

    depths: Tensor
    bias: Tensor
    parents: Tensor
    mask: Tensor
    windows: Tensor
    is_chain: bool

    @property
    def width(self) -> int:
        """Q."""
        return self.depths.shape[0]


@lru_cache(maxsize=256)
def chain_shape(width: int, conv_kernel: int) -> PassShape:
    """`width` tokens in a row: prefill chunks and DFlash chains."""
    mask = torch.ones(width, width, dtype=torch.bool).tril()
    parents = chain_parents(1, width)
    return PassShape(
        depths=torch.arange(width),
        bias=_bias(mask),
        parents=parents,
        mask=mask[None],
        windows=_windows(parents, conv_kernel),
        is_chain=True,
    )


def tree_shape(tree: Tree, conv_kernel: int) -> PassShape:
    """A draft tree: attention and recurrent layers both follow its branches."""
    mask = torch.from_numpy(ancestor_mask(tree))
    parents = torch.from_numpy(tree.parents)[None]
    return PassShape(
        depths=torch.from_numpy(tree.depths),
        bias=_bias(mask),
        parents=parents,
        mask=mask[None],
        windows=_windows(parents, conv_kernel),
        is_chain=bool((tree.parents == np.arange(tree.width) - 1).all()),
    )


def unsafe_shape(tree: Tree, conv_kernel: int) -> PassShape:
    """The ablation: attention follows the branches, recurrent layers take the rows in order."""
    shared = chain_shape(tree.width, conv_kernel)
    return PassShape(
        depths=torch.from_numpy(tree.depths),
        bias=_bias(torch.from_numpy(ancestor_mask(tree))),
        parents=shared.parents,
        mask=shared.mask,
        windows=shared.windows,
        is_chain=True,
    )


def _windows(parents: Tensor, conv_kernel: int) -> Tensor:
    return window_index(parents, conv_kernel)[0].t().contiguous()


def _bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
