"""Sliding-window decoder with ALiBi and a rolling buffer of WINDOW keys a layer (Mistral's cache)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class Ring:
    """The last WINDOW keys and values; `where` says which positions they are of, -1: none yet."""

    def __init__(self):
        self.k = self.v = None
        self.where = torch.full((WINDOW,), -1)

    def write(self, k, v, at):
        if self.k is None:
            self.k = k.new_zeros(*k.shape[:2], WINDOW, k.shape[-1])
            self.v = torch.zeros_like(self.k)
        k, v, at = k[:, :, -WINDOW:], v[:, :, -WINDOW:], at[-WINDOW:]
        slot = at % WINDOW
        self.k = self.k.index_copy(2, slot, k)
        self.v = self.v.index_copy(2, slot, v)
        self.where = self.where.index_copy(0, slot, at)

    def read(self):
        return self.k, self.v, self.where

    def extend(self, k, v, at):
        """What the buffer holds and the new keys behind it; then these are written."""
        if self.k is None:
            seen = k, v, at
        else:
            seen = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.where, at])
        self.write(k, v, at)
        return seen


class WindowLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.slopes = 2.0 ** (-8.0 * torch.arange(1, h + 1, dtype=torch.float64) / h)

    def attend(self, x, at, ring):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        where = at
        if ring is not None:
            k, v, where = ring.extend(k, v, at)
        gap = at[:, None] - where[None, :]
        seen = (gap >= 0) & (gap < WINDOW) & (where >= 0)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores - self.slopes.to(scores)[:, None, None] * gap
        y = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, at, ring=None):
        x = x + self.attend(self.n1(x), at, ring)
        return x + self.down(F.relu(self.up(self.n2(x))))


class WindowLM(nn.Module):
    def __init__(self, vocab, d, h, n, f):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(WindowLayer(d, h, f) for _ in range(n))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, start=0, rings=None):
        at = torch.arange(start, start + tokens.shape[1])
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, at, rings[i] if rings else None)
        return self.head(self.norm(x))


def cached(m, chunks):
    rings, start, out = [Ring() for _ in m.layers], 0, []
    for chunk in chunks:
        for piece in chunk.split(WINDOW, dim=1):
            out.append(m(piece, start, rings))
            start += piece.shape[1]
    return torch.cat(out, dim=1)


subject = Subject(
    kind="decoder",
    name="decoder with a rolling buffer",
    build=lambda c: WindowLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    domain={"num_heads": [1, 2, 4]},
    declares={
        "causal": True,
        "positions": "alibi",
        "window": WINDOW,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
    },
)
