"""The target: a Qwen3.5-type hybrid, with passes for a prefill chunk, one token and a tree of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ddtree_engine.reference.cache import TargetCache
from ddtree_engine.reference.checkpoint import Checkpoint, TensorSource
from ddtree_engine.reference.config import LINEAR, TargetConfig, read_target_config
from ddtree_engine.reference.deltanet import (
    Heads,
    Weights,
    convolve_chain,
    convolve_tree,
    decode,
    read,
    replay,
    split_heads,
)
from ddtree_engine.reference.layers import Mlp, Rotary, attend, columns, rms_norm
from ddtree_engine.reference.shape import PassShape, chain_shape
from ddtree_kernels.tree_gdn import gates, tree_gdn_wy
from torch import Tensor
from torch.nn import functional

PREFILL_CHUNK = 64
PREFIXES = ("model.language_model.", "model.")
# Parts of a multimodal checkpoint that a text engine has no use for.
IGNORED = ("model.visual.", "visual.", "mtp.", "model.mtp.")


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net. `in_proj` stacks the columns of q, k, v | z | b | a.

    `index` counts these layers only, as the caches do.
    """

    index: int
    in_proj: Tensor
    weights: Weights
    norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Attention:
    """Gated full attention. `in_proj` stacks the columns of q | k | v | gate.

    `qk_norm` is [q_heads + kv_heads, dim] and includes the queries' scale.
    """

    index: int
    in_proj: Tensor
    qk_norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class TargetLayer:
    """One layer; the norms hold 1 + weight."""

    mixer: DeltaNet | Attention
    input_norm: Tensor
    mlp_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True)
class Stash:
    """What a verify pass keeps per recurrent layer: pre-convolution qkv [Q, C], gate inputs a, b [Q, HV]."""

    layers: list[tuple[DeltaNet, Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Pass:
    """`hidden` [T, hidden] after the final norm, `features` [T, n * hidden] for the drafter."""

    hidden: Tensor
    features: Tensor
    stash: Stash


# (layer, pre-convolution qkv [T, C], a [T, HV], b [T, HV]) -> o float32 [T, HV, V]
DeltaRule = Callable[[DeltaNet, Tensor, Tensor, Tensor], Tensor]


class Target:
    """`Qwen3_5ForCausalLM` on text: mrope with equal rows is plain partial rotary embedding."""

    def __init__(
        self,
        config: TargetConfig,
        layers: tuple[TargetLayer, ...],
        embedding: Tensor,
        norm: Tensor,
        head: Tensor,
        rotary: Rotary,
    ) -> None:
        self.config = config
        self.layers = layers
        self.embedding = embedding
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.eps = torch.tensor(config.rms_norm_eps)
        self.heads = Heads(config.key_heads, config.value_heads, config.key_head_dim, config.value_head_dim)
        self.capture: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, positions: int) -> Target:
        """Read a target folder. Raises `InputError` for keys, tensors or shapes that don't fit."""
        return cls.of(read_target_config(folder), Checkpoint(folder, dtype), positions)

    @classmethod
    def of(cls, config: TargetConfig, weights: TensorSource, positions: int) -> Target:
        """A target of these weights, with rotary tables for `positions`."""
        prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in weights), PREFIXES[0])
        embedding = weights.take(prefix + "embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = tuple(load_layer(weights, config, prefix, index) for index in range(len(config.layer_types)))
        norm = 1 + weights.take(prefix + "norm.weight", (config.hidden_size,), torch.float32)
        tied = config.tie_word_embeddings
        head = columns(embedding if tied else weights.take("lm_head.weight", tuple(embedding.shape)))
        weights.finish(IGNORED + (("lm_head.weight",) if tied else ()))
        rotary = Rotary.of(config.rope_theta, config.rotary_dim, positions)
        return cls(config, layers, embedding, norm, head, rotary)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> float32 [T, vocabulary]."""
        return torch.mm(hidden, self.head).float()

    def prefill(self, tokens: Tensor, cache: TargetCache) -> Pass:
        """Commit `tokens`, int64 [T] with T <= PREFILL_CHUNK, to the cache."""
        shape = chain_shape(len(tokens), self.config.conv_kernel)
        leaf = torch.tensor([len(tokens) - 1])

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            state, window = cache.states[layer.index], cache.windows[layer.index]
            out, after = self._tree_rule(layer, qkv, a, b, state, window, shape, leaf)
            assert after is not None
            state.copy_(after)
            window.copy_(torch.cat([window, qkv])[-window.shape[0] :])
            return out

        result = self._forward(tokens, cache, shape, rule)
        cache.length += len(tokens)
        return result

    def step(self, token: int, cache: TargetCache) -> Pass:
        """Commit one token: a plain decode step."""

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            state, window = cache.states[layer.index], cache.windows[layer.index]
            return read(state, decode(state, window, qkv, a, b, layer.weights, self.heads))[None]

        result = self._forward(torch.tensor([token]), cache, chain_shape(1, self.config.conv_kernel), rule)
        cache.length += 1
        return result

    def verify(self, tokens: Tensor, shape: PassShape, cache: TargetCache) -> Pass:
        """Run the nodes of a tree, int64 [Q], on top of the cache without committing any of them."""
        stashed: list[tuple[DeltaNet, Tensor, Tensor, Tensor]] = []

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            stashed.append((layer, qkv, a, b))
            state, window = cache.states[layer.index], cache.windows[layer.index]
            return self._tree_rule(layer, qkv, a, b, state, window, shape)[0]

        result = self._forward(tokens, cache, shape, rule)
        return Pass(result.hidden, result.features, Stash(stashed))

    def commit(self, stash: Stash, path: Tensor, recurrent_path: Tensor, cache: TargetCache) -> None:
        """Make the accepted nodes, int64 [P] root first, part of the cache.

        Attention rows move to the front; recurrent layers replay `recurrent_path` (the same nodes, except for
        the unsafe arm) in plain decode's order and arithmetic.
        """
        cache.keep(path)
        for layer, qkv, a, b in stash.layers:
            replay(
                cache.states[layer.index],
                cache.windows[layer.index],
                qkv[recurrent_path],
                a[recurrent_path],
                b[recurrent_path],
                layer.weights,
                self.heads,
            )
        cache.length += len(path)

    def _forward(self, tokens: Tensor, cache: TargetCache, shape: PassShape, rule: DeltaRule) -> Pass:
        cache.reserve(shape.width)
        rotary = self.rotary.at(shape.depths + cache.length)
        bias = functional.pad(shape.bias, (cache.length, 0)) if shape.width > 1 else None
        x = self.embed(tokens)
        features = []
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, self.eps)
            if isinstance(layer.mixer, DeltaNet):
                x = self._add_delta_net(x, layer.mixer, normed, rule)
            else:
                x = self._add_attention(x, layer.mixer, normed, cache, rotary, bias)
            x = layer.mlp.add_to(x, rms_norm(x, layer.mlp_norm, self.eps))
            if index in self.capture:
                features.append(x)
        captured = torch.cat(features, dim=-1) if features else x[:, :0]
        return Pass(rms_norm(x, self.norm, self.eps), captured, Stash([]))

    def _add_delta_net(self, residual: Tensor, layer: DeltaNet, x: Tensor, rule: DeltaRule) -> Tensor:
        config, heads = self.config, self.config.value_heads
        rows = torch.mm(x, layer.in_proj)
        qkv, z, b, a = torch.split(rows, [config.conv_dim, config.value_dim, heads, heads], dim=-1)
        out = rule(layer, qkv, a, b)
        gate = functional.silu(z.float()).view(out.shape)
        normed = rms_norm(out, layer.norm, self.eps).mul_(gate)
        return torch.addmm(residual, normed.flatten(1).to(x.dtype), layer.out)

    def _tree_rule(
        self,
        layer: DeltaNet,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        state: Tensor,
        window: Tensor,
        shape: PassShape,
        leaf: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs of all rows and, if `leaf` names a row, the state after it; nothing is written."""
        history = torch.cat([window, qkv])
        if shape.is_chain:
            mixed = convolve_chain(history, layer.weights.conv)
        else:
            mixed = convolve_tree(history, layer.weights.conv, shape.windows)
        q, k, v = split_heads(mixed, self.heads)
        g, beta = gates(a, b, layer.weights.A_log, layer.weights.dt_bias)
        out, after = tree_gdn_wy(
            q[None],
            k[None],
            v[None],
            g[None],
            beta[None],
            state[None],
            shape.parents,
            mask=shape.mask,
            leaf=leaf,
        )
        return out[0], None if after is None else after[0]

    def _add_attention(
        self,
        residual: Tensor,
        layer: Attention,
        x: Tensor,
        cache: TargetCache,
        rotary: Rotary,
        bias: Tensor | None,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, start = x.shape[0], cache.length
        rows = torch.mm(x, layer.in_proj).view(width, 2 * heads + 2 * kv_heads, dim)
        qk = rotary.rotate(rms_norm(rows[:, : heads + kv_heads], layer.qk_norm, self.eps))
        keys, values = cache.keys[layer.index], cache.values[layer.index]
        keys[:, start : start + width] = qk[:, heads:].transpose(0, 1)
        values[:, start : start + width] = rows[:, heads + kv_heads : heads + 2 * kv_heads].transpose(0, 1)
        mixed = attend(qk[:, :heads], keys[:, : start + width], values[:, : start + width], bias)
        gate = torch.sigmoid(rows[:, heads + 2 * kv_heads :].flatten(1))
        return torch.addmm(residual, mixed.mul_(gate), layer.out)


def load_layer(weights: TensorSource, config: TargetConfig, prefix: str, index: int) -> TargetLayer:
    """Layer `index`, of tensors whose names begin with `prefix`."""
    name, hidden, inner = f"{prefix}layers.{index}.", config.hidden_size, config.intermediate_size
    mixer: DeltaNet | Attention
    if config.layer_types[index] == LINEAR:
        mixer = _load_delta_net(weights, config, name + "linear_attn.", config.linear_layers.index(index))
    else:
        mixer = _load_attention(weights, config, name + "self_attn.", config.full_layers.index(index))
    return TargetLayer(
        mixer=mixer,
        input_norm=1 + weights.take(name + "input_layernorm.weight", (hidden,), torch.float32),
        mlp_norm=1 + weights.take(name + "post_attention_layernorm.weight", (hidden,), torch.float32),
        mlp=Mlp(
            gate_up=columns(
                weights.take(name + "mlp.gate_proj.weight", (inner, hidden)),
                weights.take(name + "mlp.up_proj.weight", (inner, hidden)),
            ),
            down=columns(weights.take(name + "mlp.down_proj.weight", (hidden, inner))),
        ),
    )


def _load_delta_net(weights: TensorSource, config: TargetConfig, name: str, index: int) -> DeltaNet:
    hidden, heads, taps = config.hidden_size, config.value_heads, config.conv_kernel
    return DeltaNet(
        index=index,
        in_proj=columns(
            weights.take(name + "in_proj_qkv.weight", (config.conv_dim, hidden)),
            weights.take(name + "in_proj_z.weight", (config.value_dim, hidden)),
            weights.take(name + "in_proj_b.weight", (heads, hidden)),
            weights.take(name + "in_proj_a.weight", (heads, hidden)),
        ),
        weights=Weights(
            conv=weights.take(name + "conv1d.weight", (config.conv_dim, 1, taps), torch.float32)[:, 0]
            .t()
            .contiguous(),
            A_log=weights.take(name + "A_log", (heads,), torch.float32),
            dt_bias=weights.take(name + "dt_bias", (heads,), torch.float32),
        ),
        norm=weights.take(name + "norm.weight", (config.value_head_dim,), torch.float32),
        out=columns(weights.take(name + "out_proj.weight", (hidden, config.value_dim))),
    )


def _load_attention(weights: TensorSource, config: TargetConfig, name: str, index: int) -> Attention:
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    # Per head the checkpoint has the query's rows and then the gate's.
    q_gate = weights.take(name + "q_proj.weight", (heads * 2 * dim, hidden)).view(heads, 2, dim, hidden)
    q_norm = 1 + weights.take(name + "q_norm.weight", (dim,), torch.float32)
    k_norm = 1 + weights.take(name + "k_norm.weight", (dim,), torch.float32)
    return Attention(
        index=index,
        in_proj=columns(
            q_gate[:, 0].reshape(heads * dim, hidden),
            weights.take(name + "k_proj.weight", (kv_heads * dim, hidden)),
            weights.take(name + "v_proj.weight", (kv_heads * dim, hidden)),
            q_gate[:, 1].reshape(heads * dim, hidden),
        ),
        qk_norm=torch.cat([(q_norm * dim**-0.5).expand(heads, dim), k_norm.expand(kv_heads, dim)]),
        out=columns(weights.take(name + "o_proj.weight", (hidden, heads * dim))),
    )
