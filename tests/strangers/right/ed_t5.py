"""T5: no scale on the scores, bucketed biases owned by the first layer and used by all, RMSNorm without mean, no biases.

Unusual: scores are not divided by anything (the initialization takes care of that); a head has width 6 whatever d_model is;
the decoder's output is multiplied by d_model^-0.5 because it meets the tied embedding. Cross-attention has no positions, so
source padding may stand anywhere; so may target padding.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

D_KV = 6
NUM_BUCKETS = 32
MAX_DISTANCE = 128


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)


def relative_position_bucket(relative_position, bidirectional, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    relative_buckets = 0
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    relative_position_if_large = max_exact + (
        torch.log(relative_position.float().clamp(min=1) / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    relative_position_if_large = relative_position_if_large.clamp(max=num_buckets - 1)
    return relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)


class T5Attention(nn.Module):
    def __init__(self, d_model, n_heads, dropout, has_relative_attention_bias, bidirectional):
        super().__init__()
        self.n_heads, self.inner = n_heads, n_heads * D_KV
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.q = nn.Linear(d_model, self.inner, bias=False)
        self.k = nn.Linear(d_model, self.inner, bias=False)
        self.v = nn.Linear(d_model, self.inner, bias=False)
        self.o = nn.Linear(self.inner, d_model, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, n_heads)

    def compute_bias(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        buckets = relative_position_bucket(memory_position - context_position, self.bidirectional)
        return self.relative_attention_bias(buckets).permute([2, 0, 1]).unsqueeze(0)

    def forward(self, x, memory, seen, bias):
        b = x.size(0)

        def shape(states):
            return states.view(b, -1, self.n_heads, D_KV).transpose(1, 2)

        scores = torch.matmul(shape(self.q(x)), shape(self.k(memory)).transpose(3, 2))
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        out = torch.matmul(weights.to(memory.dtype), shape(self.v(memory)))
        return self.o(out.transpose(1, 2).contiguous().view(b, -1, self.inner))


class T5Block(nn.Module):
    def __init__(self, c, is_decoder, first):
        super().__init__()
        self.self_attention = T5Attention(c.d_model, c.num_heads, c.dropout, first, not is_decoder)
        self.self_norm = T5LayerNorm(c.d_model)
        if is_decoder:
            self.cross_attention = T5Attention(c.d_model, c.num_heads, c.dropout, False, True)
            self.cross_norm = T5LayerNorm(c.d_model)
        self.wi = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.wo = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.ff_norm = T5LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, seen, bias, memory=None, memory_seen=None):
        normed = self.self_norm(x)
        x = x + self.dropout(self.self_attention(normed, normed, seen, bias))
        if memory is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_seen, None))
        return x + self.dropout(self.wo(self.dropout(F.relu(self.wi(self.ff_norm(x))))))


class T5Stack(nn.Module):
    def __init__(self, c, is_decoder):
        super().__init__()
        self.block = nn.ModuleList([T5Block(c, is_decoder, i == 0) for i in range(c.num_layers)])
        self.final_layer_norm = T5LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, embeds, seen, memory=None, memory_seen=None):
        x = self.dropout(embeds)
        bias = self.block[0].self_attention.compute_bias(x.size(1), x.size(1))
        for block in self.block:
            x = block(x, seen, bias, memory, memory_seen)
        return self.dropout(self.final_layer_norm(x))


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model_dim = c.d_model
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = T5Stack(c, is_decoder=False)
        self.decoder = T5Stack(c, is_decoder=True)

    def forward(self, source, target, source_mask=None, target_mask=None):
        t = target.size(1)
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        memory_seen = source_mask[:, None, None, :]
        memory = self.encoder(self.shared(source), memory_seen)
        seen = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            seen = seen & target_mask[:, None, None, :]
        x = self.decoder(self.shared(target), seen, memory, memory_seen)
        return F.linear(x * (self.model_dim**-0.5), self.shared.weight)


COMMON = dict(
    kind="encoder_decoder",
    build=T5,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "t5",
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "attention_scale": 1,
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "structure": "other",
    },
)
