"""T5 (v1.0): no scale, RMSNorm, relative buckets shared by the layers of a stack."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 20


class T5LayerNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.variance_epsilon = eps

    def forward(self, h):
        variance = h.pow(2).mean(-1, keepdim=True)
        return self.weight * (h * torch.rsqrt(variance + self.variance_epsilon))


class RelativeBias(nn.Module):
    def __init__(self, n_heads, bidirectional):
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(NUM_BUCKETS, n_heads)

    def bucket(self, relative_position):
        num_buckets, buckets = NUM_BUCKETS, torch.zeros_like(relative_position)
        if self.bidirectional:
            num_buckets //= 2
            buckets = buckets + (relative_position > 0).long() * num_buckets
            relative_position = relative_position.abs()
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        large = max_exact + (
            torch.log(relative_position.clamp(min=1).double() / max_exact)
            / math.log(MAX_DISTANCE / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(relative_position < max_exact, relative_position, large)

    def forward(self, q_len, k_len):
        device = self.table.weight.device
        relative = torch.arange(k_len, device=device)[None, :] - torch.arange(q_len, device=device)[:, None]
        return self.table(self.bucket(relative)).permute(2, 0, 1)[None]


class T5Attention(nn.Module):
    def __init__(self, d, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, kv, bias):
        def split(t):
            return t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        scores = split(self.q(x)) @ split(self.k(kv)).transpose(3, 2) + bias
        return self.o((F.softmax(scores, dim=-1) @ split(self.v(kv))).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, d, n_heads, d_ff, is_decoder):
        super().__init__()
        self.norm_self, self.attn = T5LayerNorm(d), T5Attention(d, n_heads)
        self.is_decoder = is_decoder
        if is_decoder:
            self.norm_cross, self.cross = T5LayerNorm(d), T5Attention(d, n_heads)
        self.norm_ff = T5LayerNorm(d)
        self.wi, self.wo = nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, h, bias, memory=None, memory_bias=None):
        n = self.norm_self(h)
        h = h + self.attn(n, n, bias)
        if self.is_decoder:
            h = h + self.cross(self.norm_cross(h), memory, memory_bias)
        return h + self.wo(F.relu(self.wi(self.norm_ff(h))))


class T5Stack(nn.Module):
    def __init__(self, d, n_heads, d_ff, n_layers, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.relative_bias = RelativeBias(n_heads, bidirectional=not is_decoder)
        self.block = nn.ModuleList(T5Block(d, n_heads, d_ff, is_decoder) for _ in range(n_layers))
        self.final_layer_norm = T5LayerNorm(d)

    def forward(self, h, mask=None, memory=None, memory_mask=None):
        T = h.size(1)
        visible = torch.ones(T, T, dtype=torch.bool, device=h.device)
        visible = (visible.tril() if self.is_decoder else visible)[None, None]
        if mask is not None:
            visible = visible & mask[:, None, None, :]
        lowest = torch.finfo(h.dtype).min
        bias = self.relative_bias(T, T).masked_fill(~visible, lowest)
        memory_bias = 0.0
        if memory_mask is not None:
            memory_bias = h.new_zeros(memory_mask.shape).masked_fill(~memory_mask, lowest)[:, None, None, :]
        for block in self.block:
            h = block(h, bias, memory, memory_bias)
        return self.final_layer_norm(h)


class T5(nn.Module):
    def __init__(self, vocab, d, n_heads, n_layers, d_ff):
        super().__init__()
        self.d = d
        self.shared = nn.Embedding(vocab, d)
        self.encoder = T5Stack(d, n_heads, d_ff, n_layers, is_decoder=False)
        self.decoder = T5Stack(d, n_heads, d_ff, n_layers, is_decoder=True)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(self.shared(source), source_mask)
        h = self.decoder(self.shared(target), target_mask, memory, source_mask)
        return F.linear(h * self.d**-0.5, self.shared.weight)


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "t5",
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "attention_scale": 1.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "tied": True,
        "padding_side": "right",
    },
)
