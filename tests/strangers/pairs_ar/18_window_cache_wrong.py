WHAT = "with a cache the rotary position of new tokens is the cache's length (`start = state.kv[0][0].shape[2]`), which stays at window - 1 = 3 once old keys are dropped, instead of the number of tokens seen: distances to the kept keys are wrong once more than 3 tokens were seen"
"""Sliding-window decoder with rotary positions; the cache keeps what the window can still see (Mistral style)."""
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def rotate(x, positions):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    a = positions.double()[:, None] * inv
    cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
    lo, hi = x.chunk(2, dim=-1)
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.k_dim = h, d // h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, positions, past=None):
        B, T, D = x.shape
        y = self.n1(x)
        q, k, v = (w(y).view(B, T, self.h, self.k_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, positions), rotate(k, positions)
        old = 0
        if past is not None:
            old = past[0].shape[2]
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        gap = (old + torch.arange(T, device=x.device))[:, None] - torch.arange(old + T, device=x.device)
        allowed = (gap >= 0) & (gap < WINDOW)
        scores = (q @ k.mT / math.sqrt(self.k_dim)).masked_fill(~allowed, -torch.inf)
        x = x + self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
        x = x + self.w2(F.gelu(self.w1(self.n2(x))))
        return x, (k[:, :, 1 - WINDOW :], v[:, :, 1 - WINDOW :])


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("rotary needs heads of even width")
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, state=None):
        start = 0
        if state is not None and state.kv[0] is not None:
            start = state.kv[0][0].shape[2]
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, positions, None if state is None else state.kv[i])
            if state is not None:
                state.kv[i] = kv
        if state is not None:
            state.seen += tokens.shape[1]
        return self.head(self.norm(x))

    def chunked(self, chunks):
        state = SimpleNamespace(seen=0, kv=[None] * len(self.layers))
        return torch.cat([self(chunk, state) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="sliding window decoder",
    build=Decoder,
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.chunked(chunks),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)
