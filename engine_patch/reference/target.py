"""The target: a Qwen3.5-type hybrid, with passes for a prefill chunk, one token and a tree of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ddtree_engine.reference.cache import TargetCache
from ddtree_engine.reference.checkpoint import Checkpoint
from ddtree_engine.reference.config import LINEAR, TargetConfig, read_target_config
from ddtree_engine.reference.layers import Mlp, Rotary, attend, rms_norm
from ddtree_engine.reference.shape import PassShape, chain_shape
from ddtree_kernels.commit import commit_naive
from ddtree_kernels.tree_conv import commit_window_naive, tree_conv_naive
from ddtree_kernels.tree_gdn import gates, gdn_step, l2_normalise, tree_gdn_wy
from ddtree_kernels.tree_gdn.gates import Recurrence
from torch import Tensor
from torch.nn import functional

PREFILL_CHUNK = 64
PREFIXES = ("model.language_model.", "model.")
# Parts of a multimodal checkpoint that a text engine has no use for.
IGNORED = ("model.visual.", "visual.", "mtp.", "model.mtp.")

SLOT = torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net. `in_proj` stacks the rows of q, k, v | z | b | a; `index` counts these layers."""

    index: int
    in_proj: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Attention:
    """Gated full attention. `in_proj` stacks rows of q | k | v | gate; `qk_norm` is [q + kv heads, dim]."""

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
    """What a verify pass keeps of its recurrent layers: pre-convolution q, k, v and the gates' inputs.

    qkv [gdn_layers][Q, channels];  a, b [gdn_layers][Q, value_heads]
    """

    qkv: list[Tensor]
    a: list[Tensor]
    b: list[Tensor]


@dataclass(frozen=True)
class Pass:
    """`hidden` [T, hidden] after the final norm, `features` [T, n * hidden] for the drafter."""

    hidden: Tensor
    features: Tensor
    stash: Stash | None = None


# (layer, pre-convolution qkv [T, C], a [T, HV], b [T, HV]) -> o [T, HV, V]
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
        self.capture: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, positions: int) -> Target:
        """Read a target folder. Raises `InputError` for keys, tensors or shapes that don't fit."""
        config = read_target_config(folder)
        weights = Checkpoint(folder, dtype)
        prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in weights), PREFIXES[0])
        embedding = weights.take(prefix + "embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = tuple(
            _load_layer(weights, config, prefix, index) for index in range(len(config.layer_types))
        )
        norm = 1 + weights.take(prefix + "norm.weight", (config.hidden_size,), torch.float32)
        head = embedding
        if not config.tie_word_embeddings:
            head = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        weights.finish(IGNORED + (("lm_head.weight",) if config.tie_word_embeddings else ()))
        rotary = Rotary.of(config.rope_theta, config.rotary_dim, positions)
        return cls(config, layers, embedding, norm, head, rotary)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> float32 [T, vocabulary]."""
        return functional.linear(hidden, self.head).float()

    def prefill(self, tokens: Tensor, cache: TargetCache) -> Pass:
        """Commit `tokens`, int64 [T] with T <= PREFILL_CHUNK, to the cache."""
        shape = chain_shape(len(tokens), self.config.conv_kernel)
        leaf = torch.tensor([len(tokens) - 1])
        path, count = torch.arange(len(tokens))[None], torch.tensor([len(tokens)])

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            window, state = cache.windows[layer.index], cache.states[layer.index]
            inputs = self._recurrence(layer, qkv, a, b, window, state, shape)
            out, after = tree_gdn_wy(*inputs, shape.parents, mask=shape.mask, leaf=leaf)
            assert after is not None
            state.copy_(after[0])
            commit_window_naive(qkv[None], window[None], SLOT, path, count)
            return out[0]

        result = self._forward(tokens, cache, shape, rule)
        cache.length += len(tokens)
        return result

    def step(self, token: int, cache: TargetCache) -> Pass:
        """Commit one token: a plain decode step."""
        shape = chain_shape(1, self.config.conv_kernel)

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            window, state = cache.windows[layer.index], cache.states[layer.index]
            inputs = self._recurrence(layer, qkv, a, b, window, state, shape)
            repeat = self.config.value_heads // self.config.key_heads
            q, k = (x[0, 0].repeat_interleave(repeat, dim=0) for x in (inputs.q, inputs.k))
            after, out = gdn_step(q, k, inputs.v[0, 0], inputs.g[0, 0], inputs.beta[0, 0], inputs.state[0])
            state.copy_(after)
            window.copy_(torch.cat([window[:, 1:], qkv.T], dim=1))
            return out[None]

        result = self._forward(torch.tensor([token]), cache, shape, rule)
        cache.length += 1
        return result

    def verify(self, tokens: Tensor, shape: PassShape, cache: TargetCache) -> Pass:
        """Run the nodes of a tree, int64 [Q], on top of the cache without committing any of them."""
        stash = Stash([], [], [])

        def rule(layer: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
            stash.qkv.append(qkv)
            stash.a.append(a)
            stash.b.append(b)
            window, state = cache.windows[layer.index], cache.states[layer.index]
            inputs = self._recurrence(layer, qkv, a, b, window, state, shape)
            out, _ = tree_gdn_wy(*inputs, shape.parents, mask=shape.mask)
            return out[0]

        result = self._forward(tokens, cache, shape, rule)
        return Pass(result.hidden, result.features, stash)

    def commit(self, stash: Stash, path: Tensor, recurrent_path: Tensor, cache: TargetCache) -> None:
        """Make the accepted nodes, int64 [P] root first, part of the cache.

        Attention rows move to the front; recurrent layers replay `recurrent_path` (the same nodes, except for
        the unsafe arm) in plain decode's order and arithmetic.
        """
        cache.keep(path)
        count = torch.tensor([len(recurrent_path)])
        for layer in (entry.mixer for entry in self.layers):
            if not isinstance(layer, DeltaNet):
                continue
            index = layer.index
            commit_naive(
                stash.qkv[index][None],
                stash.a[index][None],
                stash.b[index][None],
                layer.A_log,
                layer.dt_bias,
                layer.conv,
                None,
                cache.windows[index : index + 1],
                cache.states[index : index + 1],
                SLOT,
                recurrent_path[None],
                count,
                key_heads=self.config.key_heads,
            )
        cache.length += len(path)

    def _forward(self, tokens: Tensor, cache: TargetCache, shape: PassShape, rule: DeltaRule) -> Pass:
        eps = self.config.rms_norm_eps
        cache.reserve(shape.width)
        rotary = self.rotary.at(shape.depths + cache.length)
        x = self.embed(tokens)
        features = []
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, eps)
            if isinstance(layer.mixer, DeltaNet):
                x = x + self._delta_net(layer.mixer, normed, rule)
            else:
                x = x + self._attention(layer.mixer, normed, cache, shape, rotary)
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm, eps))
            if index in self.capture:
                features.append(x)
        captured = torch.cat(features, dim=-1) if features else x[:, :0]
        return Pass(rms_norm(x, self.norm, eps), captured)

    def _delta_net(self, layer: DeltaNet, x: Tensor, rule: DeltaRule) -> Tensor:
        config = self.config
        heads = config.value_heads
        rows = functional.linear(x, layer.in_proj)
        qkv, z, b, a = torch.split(rows, [config.conv_dim, config.value_dim, heads, heads], dim=-1)
        out = rule(layer, qkv, a, b)
        gate = functional.silu(z.float()).view(out.shape)
        normed = rms_norm(out, layer.norm, config.rms_norm_eps).mul_(gate)
        return functional.linear(normed.to(x.dtype).flatten(1), layer.out)

    def _recurrence(
        self,
        layer: DeltaNet,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        window: Tensor,
        state: Tensor,
        shape: PassShape,
    ) -> Recurrence:
        """Convolve along the branches and prepare what the recurrence takes."""
        config = self.config
        width = qkv.shape[0]
        mixed = tree_conv_naive(
            qkv[None], window[None], SLOT, layer.conv, None, shape.parents, index=shape.windows
        )
        q, k, v = torch.split(mixed, [config.key_dim, config.key_dim, config.value_dim], dim=-1)
        q, k = (l2_normalise(x.view(1, width, config.key_heads, config.key_head_dim)) for x in (q, k))
        g, beta = gates(a[None], b[None], layer.A_log, layer.dt_bias)
        v = v.reshape(1, width, config.value_heads, config.value_head_dim).float()
        return Recurrence(q * config.key_head_dim**-0.5, k, v, g, beta, state[None])

    def _attention(
        self, layer: Attention, x: Tensor, cache: TargetCache, shape: PassShape, rotary: Rotary
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, start = x.shape[0], cache.length
        rows = functional.linear(x, layer.in_proj).view(width, 2 * heads + 2 * kv_heads, dim)
        qk = rotary.rotate(rms_norm(rows[:, : heads + kv_heads], layer.qk_norm, config.rms_norm_eps))
        keys, values = cache.keys[layer.index], cache.values[layer.index]
        keys[:, start : start + width] = qk[:, heads:].transpose(0, 1)
        values[:, start : start + width] = rows[:, heads + kv_heads : heads + 2 * kv_heads].transpose(0, 1)
        mixed = attend(
            qk[:, :heads] * dim**-0.5,
            keys[:, : start + width],
            values[:, : start + width],
            _with_prefix(shape, start),
        )
        gate = torch.sigmoid(rows[:, heads + 2 * kv_heads :].flatten(1))
        return functional.linear(mixed * gate, layer.out)


def _with_prefix(shape: PassShape, prefix: int) -> Tensor | None:
    return functional.pad(shape.bias, (prefix, 0)) if shape.width > 1 else None


def _load_layer(weights: Checkpoint, config: TargetConfig, prefix: str, index: int) -> TargetLayer:
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
            gate_up=torch.cat(
                [
                    weights.take(name + "mlp.gate_proj.weight", (inner, hidden)),
                    weights.take(name + "mlp.up_proj.weight", (inner, hidden)),
                ]
            ),
            down=weights.take(name + "mlp.down_proj.weight", (hidden, inner)),
        ),
    )


def _load_delta_net(weights: Checkpoint, config: TargetConfig, name: str, index: int) -> DeltaNet:
    hidden, heads, taps = config.hidden_size, config.value_heads, config.conv_kernel
    return DeltaNet(
        index=index,
        in_proj=torch.cat(
            [
                weights.take(name + "in_proj_qkv.weight", (config.conv_dim, hidden)),
                weights.take(name + "in_proj_z.weight", (config.value_dim, hidden)),
                weights.take(name + "in_proj_b.weight", (heads, hidden)),
                weights.take(name + "in_proj_a.weight", (heads, hidden)),
            ]
        ),
        conv=weights.take(name + "conv1d.weight", (config.conv_dim, 1, taps), torch.float32)[:, 0],
        A_log=weights.take(name + "A_log", (heads,), torch.float32),
        dt_bias=weights.take(name + "dt_bias", (heads,), torch.float32),
        norm=weights.take(name + "norm.weight", (config.value_head_dim,), torch.float32),
        out=weights.take(name + "out_proj.weight", (hidden, config.value_dim)),
    )


def _load_attention(weights: Checkpoint, config: TargetConfig, name: str, index: int) -> Attention:
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    # Per head the checkpoint has the query's rows and then the gate's.
    q_gate = weights.take(name + "q_proj.weight", (heads * 2 * dim, hidden)).view(heads, 2, dim, hidden)
    q_norm = 1 + weights.take(name + "q_norm.weight", (dim,), torch.float32)
    k_norm = 1 + weights.take(name + "k_norm.weight", (dim,), torch.float32)
    return Attention(
        index=index,
        in_proj=torch.cat(
            [
                q_gate[:, 0].reshape(heads * dim, hidden),
                weights.take(name + "k_proj.weight", (kv_heads * dim, hidden)),
                weights.take(name + "v_proj.weight", (kv_heads * dim, hidden)),
                q_gate[:, 1].reshape(heads * dim, hidden),
            ]
        ),
        qk_norm=torch.cat([q_norm.expand(heads, dim), k_norm.expand(kv_heads, dim)]),
        out=weights.take(name + "o_proj.weight", (hidden, heads * dim)),
    )
