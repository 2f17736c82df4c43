"""Hourglass language model (Nawrot et al. 2021): three tokens become one, attend, and are spread out again."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Vanilla(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (
            part.reshape(b, n, self.heads, -1).transpose(1, 2) for part in self.to_qkv(self.ln1(x)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(a.transpose(1, 2).reshape(b, n, d))
        return x + self.ff(self.ln2(x))


class Hourglass(nn.Module):
    factor = 3

    def __init__(self, c):
        super().__init__()
        make = lambda: Vanilla(c.d_model, c.num_heads, c.d_ff)  # noqa: E731
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.before, self.after = make(), make()
        self.inner = nn.ModuleList(make() for _ in range(c.num_layers))
        self.merge = nn.Linear(self.factor * c.d_model, c.d_model)
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def shorten(self, x):
        n, k = x.shape[1], self.factor
        shift = 1
        groups = -(-n // k)
        x = F.pad(x, (0, 0, shift, k))[:, : groups * k]
        return self.merge(x.reshape(x.shape[0], groups, -1))

    def forward(self, ids):
        n = ids.shape[1]
        x = self.before(self.tok(ids) + self.pos.weight[torch.arange(n, device=ids.device)])
        short = self.shorten(x)
        for layer in self.inner:
            short = layer(short)
        x = x + short.repeat_interleave(self.factor, dim=1)[:, :n]
        return self.head(self.norm(self.after(x)))


subject = Subject(
    kind="decoder",
    build=Hourglass,
    forward=lambda m, tokens: m(tokens),
    declares={"positions": "learned", "norm": "layer", "activation": "relu"},
)

WHAT = "Line 42: tokens are shifted by one before they are put in groups of three; by k - 1 = 2 it takes, else a group holds the token after its first one and spreads it backwards."
