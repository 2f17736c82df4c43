"""The Transformer of 2017. Positions count on from call to call, for decoding step by step; reset() starts over."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model, self.start = d_model, 0

    def reset(self):
        self.start = 0

    def forward(self, x):
        p = torch.arange(self.start, self.start + x.shape[1], device=x.device).double()[:, None]
        self.start += x.shape[1]
        i = torch.arange(self.d_model, device=x.device)
        angles = p / 10000 ** ((i - i % 2).double() / self.d_model)
        return x + torch.where(i % 2 == 0, angles.sin(), angles.cos()).to(x.dtype)


class MultiHead(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, memory, allowed):
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Sublayers(nn.Module):
    def __init__(self, d_model, heads, d_ff, cross):
        super().__init__()
        self.attention = MultiHead(d_model, heads)
        self.cross = MultiHead(d_model, heads) if cross else None
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3 if cross else 2))

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        x = self.norms[0](x + self.attention(x, x, allowed))
        if self.cross is not None:
            x = self.norms[1](x + self.cross(x, memory, memory_allowed))
        return self.norms[-1](x + self.ff(x))


class Transformer(nn.Module):
    def __init__(self, vocab, d_model, heads, layers, d_ff):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.positions = PositionalEncoding(d_model)
        self.encoder = nn.ModuleList(Sublayers(d_model, heads, d_ff, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Sublayers(d_model, heads, d_ff, True) for _ in range(layers))
        self.head = nn.Linear(d_model, vocab)

    def embed(self, tokens):
        return self.positions(self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim))

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_allowed = None if source_mask is None else source_mask[:, None, None, :]
        T = target.shape[1]
        target_allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            target_allowed = target_allowed & target_mask[:, None, None, :]
        self.positions.reset()
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, source_allowed)
        self.positions.reset()
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, target_allowed, memory, source_allowed)
        return self.head(x)


subject = Subject(
    kind="encoder_decoder",
    name="Transformer of 2017",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "padding_side": "right",
    },
)
