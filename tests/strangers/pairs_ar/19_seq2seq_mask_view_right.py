"""Encoder-decoder after the annotated paper (post-norm, sinusoids)."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, y, blocked=None):
        """blocked: True = may not attend, broadcastable to [B, 1, T, S]."""
        q, k, v = (f(z).unflatten(-1, (self.h, -1)).transpose(1, 2) for f, z in ((self.q, x), (self.k, y), (self.v, y)))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if blocked is None:
            w = s.softmax(-1)
        else:
            w = s.masked_fill(blocked, torch.finfo(s.dtype).min).softmax(-1).masked_fill(blocked, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))


def mlp(d, ff):
    return nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.attn, self.ff = Attention(d, h), mlp(d, ff)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, blocked):
        x = self.n1(x + self.attn(x, x, blocked))
        return self.n2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.attn, self.cross, self.ff = Attention(d, h), Attention(d, h), mlp(d, ff)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, memory, own, blocked):
        x = self.n1(x + self.attn(x, x, own))
        x = self.n2(x + self.cross(x, memory, blocked))
        return self.n3(x + self.ff(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.d = d
        self.src, self.tgt = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.out = nn.Linear(d, c.vocab_size)

    def sinusoid(self, x):
        if self.d % 2:
            raise ValueError("even d_model only")
        t = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)[:, None]
        a = t * 10000.0 ** (-torch.arange(0, self.d, 2, dtype=torch.float64, device=x.device) / self.d)
        return torch.stack([a.sin(), a.cos()], -1).flatten(1).to(x.dtype)

    def forward(self, source, target, source_mask=None, target_mask=None):
        x = self.src(source)
        x = x + self.sinusoid(x)
        blocked = None
        if source_mask is not None:
            blocked = source_mask[:, None, None, :].logical_not()
        for layer in self.encoder:
            x = layer(x, blocked)
        T = target.shape[1]
        own = torch.ones(T, T, dtype=torch.bool, device=target.device).triu(1)
        if target_mask is not None:
            own = own | ~target_mask[:, None, None, :]
        y = self.tgt(target)
        y = y + self.sinusoid(y)
        for layer in self.decoder:
            y = layer(y, x, own, blocked)
        return self.out(y)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq",
    build=Seq2Seq,
    forward=lambda m, s, t, source_mask=None, target_mask=None: m(s, t, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)
