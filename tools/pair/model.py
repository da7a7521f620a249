"""The target and the drafter as lean training modules; parameter names are those of the HF checkpoints.

Every computation follows what serves the checkpoints: Qwen3.5's zero-centred RMSNorm (1 + w), gated attention
with partial rotary, the gated delta rule with value heads grouped over key heads; DFlash's layers whose keys
are the target's projected features followed by the block itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pair.delta_rule import chunked, step_
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class TargetShape:
    """Sizes of the target; the defaults are the shipped architecture."""

    vocab: int = 4096
    hidden: int = 320
    intermediate: int = 512
    layers: int = 8
    full_every: int = 4
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    rotary: float = 0.25
    rope_theta: float = 1e7
    key_heads: int = 2
    value_heads: int = 6
    gdn_dim: int = 128
    conv: int = 4
    eps: float = 1e-6

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0

    @property
    def constant(self) -> int:
        """The residual channel that is 1 for every token and that no layer writes: the last one."""
        return self.hidden - 1


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of the drafter; four sliding (causal) layers and one full (bidirectional) layer."""

    hidden: int = 320
    intermediate: int = 512
    layer_types: tuple[str, ...] = ("sliding_attention",) * 4 + ("full_attention",)
    features: tuple[int, ...] = (1, 2, 3, 5, 6)
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    window: int = 2048
    rope_theta: float = 1e7
    block: int = 16
    mask_token: int = 3
    eps: float = 1e-6


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


class ZeroCentredNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, 1 + self.weight.float(), self.eps)


class PlainNorm(nn.Module):
    """RMSNorm whose gain is weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


def rope(x: Tensor, positions: Tensor, theta: float, size: int) -> Tensor:
    """Rotate the first `size` dimensions, pairs (i, i + size/2). x [..., T, D], positions [T] or [..., T]."""
    inverse = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = positions.float()[..., None] * inverse
    cos, sin = angle.cos(), angle.sin()
    turned, rest = x.float().split([size, x.shape[-1] - size], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class Cache:
    """Decode state of a batch of equally long sequences: one entry per layer, keys preallocated."""

    length: int = 0
    room: int = 0
    recurrent: dict[int, Tensor] = field(default_factory=dict)  # [B, value heads, key dim, value dim] fp32
    conv: dict[int, Tensor] = field(default_factory=dict)  # [B, channels, conv - 1]
    keys: dict[int, Tensor] = field(default_factory=dict)  # [B, kv heads, room, head_dim]
    values: dict[int, Tensor] = field(default_factory=dict)


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: TargetShape, layer: int) -> None:
        super().__init__()
        s = self.shape = shape
        self.layer = layer
        self.key_dim, self.value_dim = s.key_heads * s.gdn_dim, s.value_heads * s.gdn_dim
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(s.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(s.hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(s.hidden, s.value_heads, bias=False)
        self.in_proj_a = nn.Linear(s.hidden, s.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, s.conv, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(s.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(s.value_heads))
        self.norm = PlainNorm(s.gdn_dim, s.eps)
        self.out_proj = nn.Linear(self.value_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        s, (b, t, _) = self.shape, x.shape
        qkv = self.in_proj_qkv(x).transpose(1, 2)
        past = None if cache is None else cache.conv.get(self.layer)
        padded = functional.pad(qkv, (s.conv - 1, 0)) if past is None else torch.cat([past, qkv], -1)
        if cache is not None:
            cache.conv[self.layer] = padded[..., -(s.conv - 1) :].contiguous()
        taps = self.conv1d.weight[:, 0].to(qkv.dtype)
        mixed = sum(padded[..., i : i + t] * taps[:, i, None] for i in range(s.conv))
        q, k, v = (
            functional.silu(mixed).transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], -1)
        )
        q, k = (unit(y.reshape(b, t, s.key_heads, s.gdn_dim)) for y in (q, k))
        v = v.reshape(b, t, s.value_heads, s.gdn_dim)
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        if cache is not None and t == 1:
            out = step_(cache.recurrent[self.layer], q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0])[:, None]
        else:
            state = None if cache is None else cache.recurrent.get(self.layer)
            out, state = chunked(q, k, v, g, beta, state)
            if cache is not None:
                cache.recurrent[self.layer] = state
        z = self.in_proj_z(x).reshape(b, t, s.value_heads, s.gdn_dim)
        out = rms(out.float(), self.norm.weight, s.eps) * functional.silu(z.float())
        return self.out_proj(out.to(x.dtype).reshape(b, t, self.value_dim))


def unit(x: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class GatedAttention(nn.Module):
    def __init__(self, shape: TargetShape, layer: int) -> None:
        super().__init__()
        s = self.shape = shape
        self.layer = layer
        self.q_proj = nn.Linear(s.hidden, 2 * s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = ZeroCentredNorm(s.head_dim, s.eps)
        self.k_norm = ZeroCentredNorm(s.head_dim, s.eps)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        s, (b, t, _) = self.shape, x.shape
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + t, device=x.device)
        q, gate = self.q_proj(x).reshape(b, t, s.heads, 2 * s.head_dim).chunk(2, -1)
        k = self.k_proj(x).reshape(b, t, s.kv_heads, s.head_dim)
        v = self.v_proj(x).reshape(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        size = int(s.head_dim * s.rotary)
        q = rope(self.q_norm(q).transpose(1, 2), positions, s.rope_theta, size)
        k = rope(self.k_norm(k).transpose(1, 2), positions, s.rope_theta, size)
        if cache is not None:
            k, v = self.remember(cache, k, v)
        if t == 1 and cache is not None:
            scores = torch.matmul(q, k.transpose(-1, -2)).float() * s.head_dim**-0.5
            out = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        else:
            group = s.heads // s.kv_heads
            k, v = (y.repeat_interleave(group, 1) for y in (k, v))
            out = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        out = out.transpose(1, 2).reshape(b, t, -1) * gate.reshape(b, t, -1).float().sigmoid().to(out.dtype)
        return self.o_proj(out)

    def remember(self, cache: Cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to the cache. A prompt comes in one piece, so only t == 1 sees earlier keys."""
        b, h, t, d = k.shape
        if self.layer not in cache.keys:
            cache.keys[self.layer] = k.new_empty(b, h, cache.room, d)
            cache.values[self.layer] = v.new_empty(b, h, cache.room, d)
        end = cache.length + t
        cache.keys[self.layer][:, :, cache.length : end] = k
        cache.values[self.layer][:, :, cache.length : end] = v
        return cache.keys[self.layer][:, :, :end], cache.values[self.layer][:, :, :end]


class TargetLayer(nn.Module):
    def __init__(self, shape: TargetShape, layer: int) -> None:
        super().__init__()
        self.full = shape.is_full(layer)
        if self.full:
            self.self_attn = GatedAttention(shape, layer)
        else:
            self.linear_attn = GatedDeltaNet(shape, layer)
        self.mlp = Mlp(shape.hidden, shape.intermediate)
        self.input_layernorm = ZeroCentredNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = ZeroCentredNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The hybrid target. `forward` returns the normed hidden states [B, T, H] and the features asked for."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TargetLayer(shape, i) for i in range(shape.layers))
        self.norm = ZeroCentredNorm(shape.hidden, shape.eps)
        initialise(self, shape.layers)
        with torch.no_grad():
            for layer in self.layers:
                if not layer.full:
                    gdn = layer.linear_attn
                    gdn.A_log.copy_(torch.empty_like(gdn.A_log).uniform_(1, 16).log())
                    dt = torch.empty_like(gdn.dt_bias).uniform_(-6.9, -2.3).exp()
                    gdn.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                    nn.init.normal_(gdn.conv1d.weight, std=0.5 * shape.conv**-0.5)
        self.hold_constant_()

    def forward(
        self, ids: Tensor, features: tuple[int, ...] = (), cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.embed_tokens(ids)
        taken = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cache)
            if i in features:
                taken.append(x)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.norm(x), torch.cat(taken, -1) if features else None

    @torch.no_grad()
    def hold_constant_(self) -> None:
        """Put the constant channel back: embedding 1, no layer writes it, the head never reads it."""
        c = self.shape.constant
        self.embed_tokens.weight[:, c] = 1.0
        self.norm.weight[c] = -1.0
        for weight in self.writers():
            weight[c] = 0.0

    def writers(self) -> list[Tensor]:
        """Weights whose rows are residual channels."""
        out = []
        for layer in self.layers:
            out.append(layer.self_attn.o_proj.weight if layer.full else layer.linear_attn.out_proj.weight)
            out.append(layer.mlp.down_proj.weight)
        return out


class DrafterAttention(nn.Module):
    def __init__(self, shape: DrafterShape, causal: bool) -> None:
        super().__init__()
        s = self.shape = shape
        self.causal = causal
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = PlainNorm(s.head_dim, s.eps)
        self.k_norm = PlainNorm(s.head_dim, s.eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """x [B, A, F, H] normed block states, context [B, T, H], anchors [B, A] block start positions."""
        s, (b, a, f, _), t = self.shape, x.shape, context.shape[1]
        block = anchors[..., None] + torch.arange(f, device=x.device)
        seen = torch.arange(t, device=x.device)
        q = rope(self.q_norm(self.q_proj(x).reshape(b, a, f, s.heads, s.head_dim)).permute(0, 3, 1, 2, 4),
                 block[:, None], s.rope_theta, s.head_dim)  # fmt: skip
        k = rope(self.k_norm(self.k_proj(x)), block, s.rope_theta, s.head_dim)  # one kv head: [B, A, F, D]
        v = self.v_proj(x)
        ck = rope(self.k_norm(self.k_proj(context)), seen, s.rope_theta, s.head_dim)
        cv = self.v_proj(context)
        far = torch.matmul(q.reshape(b, -1, s.head_dim), ck.transpose(1, 2)).reshape(b, s.heads, a, f, t)
        near = torch.matmul(q, k[:, None].transpose(-1, -2))
        visible = (seen < anchors[..., None])[:, None, :, None]
        i = torch.arange(f, device=x.device)
        if self.causal:
            visible = visible & (seen > block[..., None] - s.window)[:, None]
            near = near.masked_fill(i[None] > i[:, None], float("-inf"))
        far = far.masked_fill(~visible, float("-inf"))
        weight = (torch.cat([far, near], -1).float() * s.head_dim**-0.5).softmax(-1).to(v.dtype)
        far, near = weight.split([t, f], -1)
        out = torch.matmul(far.reshape(b, -1, t), cv).reshape(b, s.heads, a, f, s.head_dim)
        out = out + torch.matmul(near, v[:, None])
        return self.o_proj(out.permute(0, 2, 3, 1, 4).reshape(b, a, f, -1))


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape, kind: str) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(shape, causal=kind == "sliding_attention")
        self.mlp = Mlp(shape.hidden, shape.intermediate)
        self.input_layernorm = PlainNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = PlainNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The DFlash drafter; embedding and head are the target's.

    Sliding layers are causal inside the block and see `window` positions; full layers see the whole block.
    Only features of positions before the block's anchor are visible.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        if shape.kv_heads != 1:
            raise ValueError(f"the trainer's drafter has one kv head, not {shape.kv_heads}")
        self.shape = shape
        self.fc = nn.Linear(len(shape.features) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = PlainNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DrafterLayer(shape, kind) for kind in shape.layer_types)
        self.norm = PlainNorm(shape.hidden, shape.eps)
        initialise(self, len(shape.layer_types))
        self.hold_constant_()

    def forward(self, embedding: Tensor, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, F-1, H] of the mask positions of the blocks that start at `anchors` [B, A].

        `embedding` [V, H] is the target's, `ids` [B, T] the tokens, `features` [B, T, 5 * H].
        """
        s = self.shape
        context = self.hidden_norm(self.fc(features))
        first = embedding[ids.gather(1, anchors)][:, :, None]
        masks = embedding[s.mask_token].expand(*anchors.shape, s.block - 1, -1)
        x = torch.cat([first, masks], 2)
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x[:, :, 1:])

    @torch.no_grad()
    def hold_constant_(self) -> None:
        c = self.shape.hidden - 1
        self.norm.weight[c] = 0.0
        for layer in self.layers:
            layer.self_attn.o_proj.weight[c] = 0.0
            layer.mlp.down_proj.weight[c] = 0.0


def initialise(module: nn.Module, layers: int) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            last = name.rsplit(".", 1)[-1] in ("o_proj", "out_proj", "down_proj")
            nn.init.normal_(
                child.weight, std=child.in_features**-0.5 * ((2 * layers) ** -0.5 if last else 1.0)
            )
        elif isinstance(child, nn.Embedding):
            nn.init.normal_(child.weight, std=0.05)
