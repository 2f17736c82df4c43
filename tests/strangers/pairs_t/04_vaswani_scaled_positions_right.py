"""The encoder of a translation model as in 2017: sinusoidal positions, post-norm, ReLU."""

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(length, width, device):
    """PE[t, 2i] = sin(t / 10000^(2i / width)), PE[t, 2i + 1] = cos of the same."""
    pairs = (width + 1) // 2
    rate = 10000.0 ** (-2 * torch.arange(pairs, dtype=torch.float64, device=device) / width)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]


class MultiHead(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, keep):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) / (D // self.heads) ** 0.5
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = self.drop(scores.softmax(dim=-1))
        return self.out_proj(torch.einsum("bhts,bhsk->bthk", weights, v).reshape(B, T, D))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.attention = MultiHead(width, heads, dropout)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, keep):
        x = self.norm1(x + self.drop(self.attention(x, keep)))
        return self.norm2(x + self.drop(self.feed_forward(x)))


class Encoder(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, hidden, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.layers = nn.ModuleList([EncoderLayer(width, heads, hidden, dropout) for _ in range(layers)])
        self.drop = nn.Dropout(dropout)
        self.scale = width**0.5

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        table = sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        x = self.drop(x * self.scale + table)
        keep = None if attention_mask is None else attention_mask.bool()
        for layer in self.layers:
            x = layer(x, keep)
        return x


subject = Subject(
    kind="encoder",
    name="translation encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "residual": True,
        "padding_side": "right",
    },
)
