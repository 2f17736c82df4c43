"""Gemma-2-like decoder: the option of capped scores, added to an existing block."""
import math

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

CAP = 5.0


class RootNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class CappedAttention(nn.Module):
    def __init__(self, d: int, h: int, cap: float | None = None):
        super().__init__()
        self.h, self.cap = h, cap
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def capped(self, s: Tensor) -> Tensor:
        return s if self.cap is None else self.cap * torch.tanh(s / self.cap)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (self.h, -1)).movedim(2, 1) for f in (self.q, self.k, self.v))
        s = q @ k.mT / math.sqrt(q.size(-1))
        s = self.capped(s).masked_fill(hidden, -math.inf)
        return self.o((s.softmax(-1) @ v).movedim(1, 2).flatten(2))


class GemmaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pre, self.pre_ff = RootNorm(c.d_model), RootNorm(c.d_model)
        self.attention = CappedAttention(c.d_model, c.num_heads, cap=CAP)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, hidden):
        x = x + self.attention(self.pre(x), hidden)
        return x + self.down(nn.functional.gelu(self.up(self.pre_ff(x)), approximate="tanh"))


class Gemma(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.table, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(GemmaLayer(c) for _ in range(c.num_layers))
        self.last = RootNorm(c.d_model)

    def forward(self, ids):
        t = ids.size(1)
        x = self.table(ids) + self.place(torch.arange(t, device=ids.device))
        hidden = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.last(x) @ self.table.weight.T


subject = Subject(
    kind="decoder",
    build=Gemma,
    forward=lambda m, tokens: m(tokens),
    declares={"soft_cap": CAP, "norm": "rms", "norm_placement": "pre", "activation": "gelu_tanh", "positions": "learned",
              "tied": True, "bias": False},
)
