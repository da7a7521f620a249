"""The DFlash drafter: one pass over a block of mask tokens, attending to the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from ddtree_engine.reference.cache import DrafterCache
from ddtree_engine.reference.checkpoint import Checkpoint, TensorSource
from ddtree_engine.reference.config import SLIDING, DrafterConfig, TargetConfig, read_drafter_config
from ddtree_engine.reference.layers import Mlp, Rotary, attend, columns, rms_norm
from torch import Tensor


@dataclass(frozen=True)
class DrafterLayer:
    """One layer. `qkv` stacks the columns of queries, keys and values.

    `qk_norm` is [q_heads + kv_heads, head_dim] and includes the queries' scale.
    """

    sliding: bool
    causal: bool
    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp: Mlp

    @property
    def kind(self) -> tuple[bool, bool]:
        """What decides which keys a block sees."""
        return self.sliding, self.causal


@dataclass(frozen=True)
class Candidates:
    """Per position after the root, best first: `ids` int64 [F-1, K], `logprobs` float32 [F-1, K]."""

    ids: Tensor
    logprobs: Tensor


class Drafter:
    """`DFlashDraftModel` (arXiv 2602.06036) with the target's embedding and head.

    `context_kv` stacks the key and value columns of all layers, so that committed tokens cost one projection.
    """

    def __init__(
        self,
        config: DrafterConfig,
        layers: tuple[DrafterLayer, ...],
        fc: Tensor,
        hidden_norm: Tensor,
        norm: Tensor,
        rotary: Rotary,
    ) -> None:
        self.config = config
        self.layers = layers
        self.fc = fc
        self.hidden_norm = hidden_norm
        self.norm = norm
        self.rotary = rotary
        first_kv_row = config.num_heads * config.head_dim
        self.context_kv = torch.cat([layer.qkv[:, first_kv_row:] for layer in layers], dim=1)
        self.eps = torch.tensor(config.rms_norm_eps)
        self.context_k_norm = torch.stack([layer.qk_norm[config.num_heads :] for layer in layers])

    @classmethod
    def load(cls, folder: Path, target: TargetConfig, dtype: torch.dtype, positions: int) -> Drafter:
        """Read a drafter folder. Raises `InputError` for keys, tensors or shapes that don't fit."""
        return cls.of(read_drafter_config(folder, target), Checkpoint(folder, dtype), positions)

    @classmethod
    def of(cls, config: DrafterConfig, weights: TensorSource, positions: int) -> Drafter:
        """A drafter of these weights, with rotary tables for `positions`."""
        hidden = config.hidden_size
        layers = tuple(_load_layer(weights, config, index) for index in range(len(config.layer_types)))
        fc = columns(weights.take("fc.weight", (hidden, len(config.target_layer_ids) * hidden)))
        hidden_norm = weights.take("hidden_norm.weight", (hidden,), torch.float32)
        norm = weights.take("norm.weight", (hidden,), torch.float32)
        weights.finish()
        rotary = Rotary.of(config.rope_theta, config.head_dim, positions)
        return cls(config, layers, fc, hidden_norm, norm, rotary)

    def extend(self, features: Tensor, cache: DrafterCache) -> None:
        """Append committed tokens to the keys and values, from their target features [T, n * hidden]."""
        config = self.config
        start, stop = cache.length, cache.length + features.shape[0]
        context = rms_norm(torch.mm(features, self.fc), self.hidden_norm, self.eps)
        rows = torch.mm(context, self.context_kv)
        shape = (features.shape[0], len(self.layers), 2, config.num_kv_heads, config.head_dim)
        keys, values = rows.view(shape).unbind(dim=2)
        keys = rms_norm(keys, self.context_k_norm, self.eps)
        rotated = self.rotary.span(start, stop).rotate(keys.flatten(1, 2)).view(keys.shape)
        cache.reserve(stop - start)
        cache.keys[:, :, start:stop] = rotated.permute(1, 2, 0, 3)
        cache.values[:, :, start:stop] = values.permute(1, 2, 0, 3)
        cache.length = stop

    def hidden(self, embedded: Tensor, cache: DrafterCache) -> Tensor:
        """Final normed hidden states of one block, [F, hidden] -> [F, hidden], from position `length` on."""
        start, width = cache.length, embedded.shape[0]
        cache.reserve(width)
        rotary = self.rotary.span(start, start + width)
        views = {kind: self._visible(*kind, start, width) for kind in {layer.kind for layer in self.layers}}
        x = embedded
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index], cache.values[index]
            queries = self._attention_rows(layer, x, rotary, keys, values, start)
            first, bias = views[layer.kind]
            mixed = attend(queries, keys[:, first : start + width], values[:, first : start + width], bias)
            x = torch.addmm(x, mixed, layer.out)
            x = layer.mlp.add_to(x, rms_norm(x, layer.mlp_norm, self.eps))
        return rms_norm(x, self.norm, self.eps)

    def _attention_rows(
        self, layer: DrafterLayer, x: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, start: int
    ) -> Tensor:
        """Write the block's keys and values into the scratch rows; return its queries."""
        config, width = self.config, x.shape[0]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        rows = torch.mm(rms_norm(x, layer.input_norm, self.eps), layer.qkv)
        rows = rows.view(width, heads + 2 * kv_heads, config.head_dim)
        qk = rotary.rotate(rms_norm(rows[:, : heads + kv_heads], layer.qk_norm, self.eps))
        keys[:, start : start + width] = qk[:, heads:].transpose(0, 1)
        values[:, start : start + width] = rows[:, heads + kv_heads :].transpose(0, 1)
        return qk[:, :heads]

    def _visible(self, sliding: bool, causal: bool, start: int, width: int) -> tuple[int, Tensor | None]:
        """First visible key row and the bias over the rows from there on (None: all are seen)."""
        window = self.config.window if sliding else None
        first = 0 if window is None else max(0, start - window + 1)
        if not causal and window is None:
            return first, None
        queries = torch.arange(start, start + width)[:, None]
        keys = torch.arange(first, start + width)[None, :]
        hidden = torch.zeros(width, start + width - first, dtype=torch.bool)
        if causal:
            hidden |= keys > queries
        if window is not None:
            hidden |= (queries - keys).abs() >= window
        return first, torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _load_layer(weights: TensorSource, config: DrafterConfig, index: int) -> DrafterLayer:
    name, hidden, dim = f"layers.{index}.", config.hidden_size, config.head_dim
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    q_norm = weights.take(name + "self_attn.q_norm.weight", (dim,), torch.float32)
    k_norm = weights.take(name + "self_attn.k_norm.weight", (dim,), torch.float32)
    return DrafterLayer(
        sliding=config.layer_types[index] == SLIDING,
        causal=config.causal[index],
        input_norm=weights.take(name + "input_layernorm.weight", (hidden,), torch.float32),
        qkv=columns(
            weights.take(name + "self_attn.q_proj.weight", (heads * dim, hidden)),
            weights.take(name + "self_attn.k_proj.weight", (kv_heads * dim, hidden)),
            weights.take(name + "self_attn.v_proj.weight", (kv_heads * dim, hidden)),
        ),
        qk_norm=torch.cat([(q_norm * dim**-0.5).expand(heads, dim), k_norm.expand(kv_heads, dim)]),
        out=columns(weights.take(name + "self_attn.o_proj.weight", (hidden, heads * dim))),
        mlp_norm=weights.take(name + "post_attention_layernorm.weight", (hidden,), torch.float32),
        mlp=Mlp(
            gate_up=columns(
                weights.take(name + "mlp.gate_proj.weight", (inner, hidden)),
                weights.take(name + "mlp.up_proj.weight", (inner, hidden)),
            ),
            down=columns(weights.take(name + "mlp.down_proj.weight", (hidden, inner))),
        ),
    )
