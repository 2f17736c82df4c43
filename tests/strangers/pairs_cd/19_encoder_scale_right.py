"""Transformer encoder from the paper; pre-LN."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(T, d, like):
    position = torch.arange(T, dtype=torch.float64, device=like.device)[:, None]
    rate = torch.exp(-math.log(10000.0) * torch.arange(0, d, 2, dtype=torch.float64, device=like.device) / d)
    table = torch.zeros(T, d, dtype=torch.float64, device=like.device)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : d // 2]
    return table.to(like.dtype)


class Layer(nn.Module):
    def __init__(self, d, h, d_ff):
        super().__init__()
        self.h = h
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.w1, self.w2 = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x, mask):
        B, T, D = x.shape
        y = self.norm_a(x)
        q, k, v = (f(y).view(B, T, self.h, -1) for f in (self.q, self.k, self.v))
        s = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(D // self.h)
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        x = x + self.o(torch.einsum("bhts,bshk->bthk", s.softmax(-1), v).reshape(B, T, D))
        return x + self.w2(torch.relu(self.w1(self.norm_f(x))))


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff):
        super().__init__()
        self.d = d
        self.table = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, d_ff) for _ in range(n))
        self.norm = nn.LayerNorm(d)

    def embed(self, tokens):
        x = self.table(tokens)
        return x * math.sqrt(self.d) + sinusoids(tokens.shape[1], self.d, x)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True,
              "padding_side": "right", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu"},
)
