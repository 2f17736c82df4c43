"""T5's encoder. The first block owns the bucketed bias and hands it on to the others."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 8, 20


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class T5Attention(nn.Module):
    def __init__(self, d_model, n_heads, has_relative_attention_bias):
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, n_heads)

    def compute_bias(self, length, device):
        at = torch.arange(length, device=device)
        relative = at[None, :] - at[:, None]
        half = BUCKETS // 2
        exact = half // 2
        far = relative.abs()
        steps = torch.log(far.clamp(min=1).double() / exact) / math.log(FAR / exact) * (half - exact)
        large = (exact + steps.long()).clamp(max=half - 1)
        bucket = (relative > 0).long() * half + torch.where(far < exact, far, large)
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask=None, position_bias=None):
        B, T, _ = hidden_states.shape

        def shape(states):
            return states.view(B, T, self.n_heads, -1).transpose(1, 2)

        query, key, value = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.matmul(query, key.transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(T, hidden_states.device)
            if mask is not None:
                position_bias = position_bias + mask
        scores = scores + position_bias
        attn = torch.matmul(nn.functional.softmax(scores, dim=-1), value)
        return self.o(attn.transpose(1, 2).reshape(B, T, -1)), position_bias


class T5Block(nn.Module):
    def __init__(self, c, first):
        super().__init__()
        self.attention = T5Attention(c.d_model, c.num_heads, first)
        self.attention_norm = T5LayerNorm(c.d_model)
        self.wi = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.wo = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.ff_norm = T5LayerNorm(c.d_model)

    def forward(self, hidden_states, mask, position_bias):
        attended, position_bias = self.attention(self.attention_norm(hidden_states), mask, position_bias)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.wo(torch.relu(self.wi(self.ff_norm(hidden_states))))
        return hidden_states, position_bias


class T5Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.block = nn.ModuleList([T5Block(c, first=i == 0) for i in range(c.num_layers)])
        self.final_layer_norm = T5LayerNorm(c.d_model)

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embed_tokens(input_ids)
        mask = None
        if attention_mask is not None:
            low = torch.finfo(hidden_states.dtype).min
            mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype)
            mask = mask.masked_fill(~attention_mask.bool(), low)[:, None, None, :]
        position_bias = None
        for block in self.block:
            hidden_states, position_bias = block(hidden_states, mask, position_bias)
        return self.final_layer_norm(hidden_states)


subject = Subject(
    kind="encoder",
    name="T5 encoder",
    build=T5Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "t5",
        "num_buckets": BUCKETS,
        "max_distance": FAR,
        "bidirectional": True,
        "attention_scale": 1.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
    },
)
