"""T5's encoder: the first layer makes the relative position bias, the others get it handed on."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class T5SelfAttention(nn.Module):
    def __init__(self, d_model, n_heads, has_relative_attention_bias, num_buckets=8, max_distance=16):
        super().__init__()
        self.n_heads, self.d_kv = n_heads, d_model // n_heads
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads) if has_relative_attention_bias else None

    def bucket(self, relative_position):
        half = self.num_buckets // 2
        offset = (relative_position > 0).long() * half
        distance = relative_position.abs()
        max_exact = half // 2
        ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        large = (max_exact + (ratio * (half - max_exact)).long()).clamp(max=half - 1)
        return offset + torch.where(distance < max_exact, distance, large)

    def compute_bias(self, length, device):
        places = torch.arange(length, device=device)
        buckets = self.bucket(places[None, :] - places[:, None])
        return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask=None, position_bias=None):
        batch, length, _ = hidden_states.shape

        def shape(states):
            return states.view(batch, length, self.n_heads, self.d_kv).transpose(1, 2)

        query, key, value = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.matmul(query, key.transpose(3, 2))  # T5 does not scale
        if position_bias is None:
            position_bias = self.compute_bias(length, scores.device)
            if mask is not None:
                position_bias = position_bias + mask
        weights = (scores + position_bias).softmax(dim=-1)
        context = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, -1)
        return self.o(context), position_bias


class T5Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff, has_relative_attention_bias):
        super().__init__()
        self.attention = T5SelfAttention(d_model, n_heads, has_relative_attention_bias)
        self.attention_norm = T5LayerNorm(d_model)
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.ff_norm = T5LayerNorm(d_model)

    def forward(self, hidden_states, mask, position_bias):
        attended, position_bias = self.attention(self.attention_norm(hidden_states), mask, position_bias)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.wo(torch.relu(self.wi(self.ff_norm(hidden_states))))
        return hidden_states, position_bias


class T5Encoder(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.block = nn.ModuleList([T5Block(d_model, n_heads, d_ff, i == 0) for i in range(n_layers)])
        self.final_layer_norm = T5LayerNorm(d_model)

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.shared(input_ids)
        mask = None
        if attention_mask is not None:
            mask = torch.zeros(attention_mask.shape, dtype=hidden_states.dtype, device=hidden_states.device)
            mask = mask.masked_fill(~attention_mask.bool(), torch.finfo(hidden_states.dtype).min)[:, None, None, :]
        position_bias = None
        for block in self.block:
            hidden_states, position_bias = block(hidden_states, mask, position_bias)
        return self.final_layer_norm(hidden_states)


subject = Subject(
    kind="encoder",
    name="T5 encoder",
    build=lambda c: T5Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "t5",
        "bidirectional": True,
        "num_buckets": 8,
        "max_distance": 16,
        "attention_scale": 1.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
    },
)
