"""A prefix language model: the first PREFIX tokens are read both ways, what follows is written from left to right."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

PREFIX = 3


def sinusoids(length, channels, device=None):
    """Sines in the first half of the channels, cosines in the second."""
    steps = torch.arange(channels // 2, dtype=torch.float64, device=device) * (2 / channels)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * 10000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def visibility(length, prefix, device=None):
    """[queries, keys], True where a query may look."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    allowed[:, :prefix] = True
    return allowed


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, allowed):
        n, t, d = x.shape

        def split(y):
            return y.reshape(n, t, self.num_heads, d // self.num_heads).permute(0, 2, 1, 3)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        logits = q @ k.mT / math.sqrt(d // self.num_heads)
        logits = logits.masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return self.out((self.drop(weights) @ v).permute(0, 2, 1, 3).reshape(n, t, d))


class PrefixLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, num_heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(approximate="tanh"), nn.Linear(d_ff, d_model))
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, allowed):
        x = x + self.drop(self.attention(self.norm1(x), allowed))
        return x + self.drop(self.mlp(self.norm2(x)))


class PrefixLM(nn.Module):
    def __init__(self, vocab_size, d_model=64, num_heads=4, num_layers=2, d_ff=256, dropout=0.1, prefix=PREFIX):
        super().__init__()
        self.prefix = prefix
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(PrefixLayer(d_model, num_heads, d_ff, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens, attention_mask=None):
        length = tokens.shape[1]
        x = self.embedding(tokens)
        x = self.drop(x + sinusoids(length, x.shape[-1], x.device).to(x.dtype))
        allowed = visibility(length, self.prefix, x.device)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="prefix lm",
    build=lambda c: PrefixLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (8, 16, 32)},
    declares={
        "prefix": PREFIX,
        "positions": "sinusoidal",
        "layout": "halves",
        "base": 10000,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": True,
        "tied": False,
        "embedding_scale": False,
        "beyond_max_len": "works",
        "memory": "quadratic",
        "padding_side": "right",
        "structure": "textbook",
    },
)
