"""Wide weights for a server: made on its device from the small checkpoint that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from ddtree_engine.bed.embed import tensors
from ddtree_engine.bed.folders import bed_from_json
from torch import Tensor, nn


def wide_weights(
    data: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the wide checkpoint, whole, one at a time.

    data     what `config.json` has under `ddtree_bed`
    weights  (name, tensor) of the small checkpoint, in any order
    model    the module they are for: says the device and the type

    Tensor-parallel ranks each make all of them and keep their part. Beside the model exist the tensor that is
    being loaded and the next one: at most two of 2.5 GB for a 27B.
    """
    small = dict(weights)
    parameter = next(model.parameters())
    bed, filling = bed_from_json(data, torch.get_default_dtype(), parameter.device)
    yield from tensors(bed, small.__getitem__, filling)
