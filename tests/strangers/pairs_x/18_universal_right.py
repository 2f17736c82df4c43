"""Universal Transformer (Dehghani et al. 2019), encoder: one block again and again, with the coordinates added each time."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def signal(positions, dim, like):
    """Sines on even channels, cosines on odd ones, as in Vaswani et al."""
    i = torch.arange(0, dim, 2, dtype=torch.float64, device=like.device)
    rates = torch.pow(10000.0, -i / dim)
    angle = positions.to(device=like.device, dtype=torch.float64)[:, None] * rates
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return table.to(like.dtype)


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = self.dropout(scores.softmax(-1)) @ v
        return self.o(out.transpose(1, 2).reshape(B, T, D))


class UniversalBlock(nn.Module):
    def __init__(self, dim, heads, ffn, dropout):
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.transition = nn.Sequential(nn.Linear(dim, ffn), nn.ReLU(), nn.Linear(ffn, dim))
        self.transition_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed):
        x = self.attention_norm(x + self.dropout(self.attention(x, allowed)))
        return self.transition_norm(x + self.dropout(self.transition(x)))


class UniversalTransformer(nn.Module):
    def __init__(self, vocab_size, dim, heads, steps, ffn, dropout):
        super().__init__()
        if dim % 2:
            raise ValueError("the width is even")
        self.dim, self.steps = dim, steps
        self.embedding = nn.Embedding(vocab_size, dim)
        self.block = UniversalBlock(dim, heads, ffn, dropout)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embedding(tokens) * self.dim**0.5
        position = signal(torch.arange(tokens.shape[1]), self.dim, x)
        time = signal(torch.arange(1, self.steps + 1), self.dim, x)
        for step in range(self.steps):
            x = x + position + time[step]
            x = self.block(x, allowed)
        return self.head(x)


subject = Subject(
    kind="encoder",
    name="Universal Transformer",
    build=lambda c: UniversalTransformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "shared_layers": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "tied": False,
        "embedding_scale": True,
        "padding_side": "right",
    },
)
