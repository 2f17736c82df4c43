"""T5: relative position buckets, RMS norms before each sublayer, no scale, tied embeddings."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 20


class T5LayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def relative_position_bucket(relative_position, bidirectional, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    relative_buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).long() * num_buckets
        relative_position = relative_position.abs()
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    if_large = max_exact + (
        torch.log(relative_position.float().clamp(min=1) / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).long()
    if_large = if_large.clamp(max=num_buckets - 1)
    return relative_buckets + torch.where(is_small, relative_position, if_large)


class T5Attention(nn.Module):
    def __init__(self, d, heads, is_decoder=False, has_relative_attention_bias=False):
        super().__init__()
        self.heads, self.is_decoder = heads, is_decoder
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, heads)

    def compute_bias(self, query_length, key_length, device):
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        relative_position = memory_position - context_position
        bucket = relative_position_bucket(relative_position, bidirectional=not self.is_decoder)
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden, states, allowed, position_bias=None):
        b = hidden.shape[0]

        def shape(t):
            return t.view(b, t.shape[1], self.heads, -1).transpose(1, 2)

        scores = torch.matmul(shape(self.q(hidden)), shape(self.k(states)).transpose(3, 2))
        if position_bias is not None:
            scores = scores + position_bias
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = torch.matmul(scores.softmax(-1), shape(self.v(states)))
        return self.o(out.transpose(1, 2).reshape(hidden.shape))


class T5Block(nn.Module):
    def __init__(self, d, heads, d_ff, is_decoder, first):
        super().__init__()
        self.ln_self, self.self_attn = T5LayerNorm(d), T5Attention(d, heads, is_decoder, first)
        if is_decoder:
            self.ln_cross, self.cross_attn = T5LayerNorm(d), T5Attention(d, heads, is_decoder)
        self.ln_ff, self.wi, self.wo = T5LayerNorm(d), nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, x, allowed, bias, memory=None, memory_allowed=None):
        h = self.ln_self(x)
        x = x + self.self_attn(h, h, allowed, bias)
        if memory is not None:
            x = x + self.cross_attn(self.ln_cross(x), memory, memory_allowed)
        return x + self.wo(self.wi(self.ln_ff(x)).relu())


class T5Stack(nn.Module):
    def __init__(self, c, is_decoder):
        super().__init__()
        self.block = nn.ModuleList(
            [T5Block(c.d_model, c.num_heads, c.d_ff, is_decoder, first=i == 0) for i in range(c.num_layers)]
        )
        self.final_layer_norm = T5LayerNorm(c.d_model)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        bias = self.block[0].self_attn.compute_bias(x.shape[1], x.shape[1], x.device)
        for block in self.block:
            x = block(x, allowed, bias, memory, memory_allowed)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder, self.decoder = T5Stack(c, False), T5Stack(c, True)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight
        self.d_model = c.d_model

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        if target_mask is None:
            target_mask = torch.ones_like(target, dtype=torch.bool)
        seen = source_mask[:, None, None, :]
        memory = self.encoder(self.shared(source), seen)
        T = target.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=target.device).tril() & target_mask[:, None, None, :]
        hidden = self.decoder(self.shared(target), causal, memory, seen)
        return self.lm_head(hidden * self.d_model**-0.5)


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=T5,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "t5", "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE, "attention_scale": 1,
        "norm": "rms", "norm_placement": "pre", "final_norm": True, "activation": "relu", "bias": False, "tied": True,
        "padding_side": "right",
    },
)
