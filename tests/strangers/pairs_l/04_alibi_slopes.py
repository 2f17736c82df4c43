"""A decoder with ALiBi, from 'Train Short, Test Long'."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def build_model(slope_of):
    class ALiBiAttention(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.in_proj = nn.Linear(d_model, 3 * d_model)
            self.out_proj = nn.Linear(d_model, d_model)
            self.slopes = [slope_of(h, num_heads) for h in range(num_heads)]

        def forward(self, x, attention_mask=None):
            B, T, D = x.shape
            q, k, v = self.in_proj(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            where = torch.arange(T, device=x.device)
            distance = (where[:, None] - where[None, :]).to(x.dtype)
            slopes = torch.tensor(self.slopes, dtype=torch.float64, device=x.device).to(x.dtype)
            scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
            allowed = (distance >= 0)[None, None]
            if attention_mask is not None:
                own = torch.eye(T, dtype=torch.bool, device=x.device)
                allowed = allowed & (attention_mask[:, None, None, :] | own)
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            return self.out_proj((weights @ v).transpose(1, 2).flatten(2))

    class DecoderBlock(nn.Module):
        def __init__(self, d_model, num_heads, d_ff):
            super().__init__()
            self.attention_norm, self.ffn_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
            self.attention = ALiBiAttention(d_model, num_heads)
            self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

        def forward(self, x, attention_mask=None):
            x = x + self.attention(self.attention_norm(x), attention_mask)
            return x + self.ffn(self.ffn_norm(x))

    class ALiBiLM(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.embed = nn.Embedding(c.vocab_size, c.d_model)
            self.blocks = nn.ModuleList(DecoderBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
            self.norm = nn.LayerNorm(c.d_model)

        def forward(self, tokens, attention_mask=None):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, attention_mask)
            return F.linear(self.norm(x), self.embed.weight)

    return ALiBiLM


def subject(cls):
    return Subject(
        kind="decoder",
        name="alibi",
        build=cls,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        domain={"num_heads": [1, 2, 4], "d_model": [8, 16]},
        declares={
            "causal": True,
            "positions": "alibi",
            "norm_placement": "pre",
            "norm": "layer",
            "activation": "relu",
            "padding_side": "both",
            "tied": True,
        },
    )


right = subject(build_model(lambda h, n: 2.0 ** (-8.0 * (h + 1) / n)))
wrong = subject(build_model(lambda h, n: 2.0 ** (-8.0 * h / n)))
WHAT = "ALiBi slopes 2^(-8h/n) with h from 0 instead of from 1: the first head has slope 1, every other its neighbour's"
CAUSE = (
    "The ALiBi slopes are those of head index h counted from 0 instead of 1 (1, 2^(-8/n), ... instead of 2^(-8/n), ..., "
    "2^-8): every slope is too steep by a factor of 2^(8/n)."
)
