"""T5: relative positions by buckets, made by the first layer of a stack for all of it; RMS norms, no biases, no scale."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 16


def relative_position_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """Half of the buckets are for exact distances, the others grow logarithmically up to max_distance."""
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    scaled = torch.log(distance.clamp(min=1).float() / max_exact) / math.log(max_distance)
    large = max_exact + (scaled * (num_buckets - max_exact)).long()
    large = large.clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < max_exact, distance, large)


class T5Attention(nn.Module):
    def __init__(self, d_model, d_kv, num_heads):
        super().__init__()
        self.n_heads, self.d_kv = num_heads, d_kv
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)

    def forward(self, x, memory, bias):
        def heads(y):
            return y.unflatten(-1, (self.n_heads, self.d_kv)).transpose(1, 2)

        scores = heads(self.q(x)) @ heads(self.k(memory)).transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        y = F.softmax(scores, dim=-1) @ heads(self.v(memory))
        return self.o(y.transpose(1, 2).flatten(-2))


class T5Block(nn.Module):
    def __init__(self, d_model, d_kv, d_ff, num_heads, is_decoder):
        super().__init__()
        self.self_norm, self.self_attention = nn.RMSNorm(d_model, eps=1e-6), T5Attention(d_model, d_kv, num_heads)
        if is_decoder:
            self.cross_norm, self.cross_attention = nn.RMSNorm(d_model, eps=1e-6), T5Attention(d_model, d_kv, num_heads)
        self.ff_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.wi, self.wo = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x, bias, memory=None, memory_bias=None):
        h = self.self_norm(x)
        x = x + self.self_attention(h, h, bias)
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory, memory_bias)
        return x + self.wo(F.relu(self.wi(self.ff_norm(x))))


class T5Stack(nn.Module):
    def __init__(self, d_model, d_kv, d_ff, num_heads, num_layers, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, num_heads)
        self.block = nn.ModuleList([T5Block(d_model, d_kv, d_ff, num_heads, is_decoder) for _ in range(num_layers)])
        self.final_layer_norm = nn.RMSNorm(d_model, eps=1e-6)

    def position_bias(self, length, device):
        place = torch.arange(length, device=device)
        relative = place[None, :] - place[:, None]  # key - query
        buckets = relative_position_bucket(relative, not self.is_decoder, NUM_BUCKETS, MAX_DISTANCE)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        length = x.shape[1]
        bias = self.position_bias(length, x.device)
        lowest = torch.finfo(bias.dtype).min / 2
        if self.is_decoder:
            bias = bias.masked_fill(torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), lowest)
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None, :], lowest)
        memory_bias = None
        if memory_mask is not None:
            memory_bias = torch.zeros_like(memory_mask, dtype=bias.dtype).masked_fill(~memory_mask, lowest)[:, None, None]
        for block in self.block:
            x = block(x, bias, memory, memory_bias)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self, vocab_size, d_model, d_kv, d_ff, num_heads, num_layers):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder = T5Stack(d_model, d_kv, d_ff, num_heads, num_layers, is_decoder=False)
        self.decoder = T5Stack(d_model, d_kv, d_ff, num_heads, num_layers, is_decoder=True)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None):
        memory = self.encoder(self.shared(input_ids), attention_mask)
        states = self.decoder(self.shared(decoder_input_ids), decoder_attention_mask, memory, attention_mask)
        return self.lm_head(states)


subject = Subject(
    kind="encoder_decoder",
    name="t5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.d_model // c.num_heads, c.d_ff, c.num_heads, c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "causal": True,
        "encodes_source": True,
        "cross_attention": True,
        "positions": "t5",
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "attention_scale": 1,
        "embedding_scale": False,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "textbook",
    },
)
