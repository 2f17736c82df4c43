"""Longformer's local attention: every token sees `window` tokens on each side, by unfolding padded keys and values."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def bands(self, x):
        """[B, H, T, K] -> [B, H, T, K, 2w + 1]"""
        w = self.window
        return F.pad(x, (0, 0, w, w)).unfold(2, 2 * w + 1, 1)

    def forward(self, x, keep):
        w = self.window
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = torch.einsum("bhtk,bhtkw->bhtw", q, self.bands(k)) * q.size(-1) ** -0.5
        real = F.pad(keep.to(x.dtype), (w, w), value=0.0).unfold(1, 2 * w + 1, 1)
        scores = scores.masked_fill(real[:, None] == 0, torch.finfo(x.dtype).min)
        context = torch.einsum("bhtw,bhtkw->bhtk", scores.softmax(-1), self.bands(v))
        return self.out(context.transpose(1, 2).flatten(2))


class LongformerLayer(nn.Module):
    def __init__(self, dim, heads, ffn, window):
        super().__init__()
        self.attention = LocalAttention(dim, heads, window)
        self.attention_norm, self.output_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.intermediate, self.output = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x, keep):
        x = self.attention_norm(x + self.attention(x, keep))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Longformer(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn, positions, window=2):
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, dim), nn.Embedding(positions, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(LongformerLayer(dim, heads, ffn, window) for _ in range(layers))

    def forward(self, tokens, keep=None):
        if keep is None:
            keep = torch.ones_like(tokens, dtype=torch.bool)
        x = self.norm(self.word(tokens) + self.position.weight[: tokens.size(1)])
        for layer in self.layers:
            x = layer(x, keep)
        return x


subject = Subject(
    kind="encoder",
    name="Longformer",
    build=lambda c: Longformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "sparse": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "memory": "linear",
        "padding_side": "right",
    },
)
