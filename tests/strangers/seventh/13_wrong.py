"""Sequence to sequence in the manner of Marian; the causal masks are made once for every shape."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


@lru_cache(maxsize=128)
def causal_mask(batch, length, device):
    """[batch, 1, length, length], True where a query may look."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask.repeat(batch, 1, 1, 1)


def marian_positions(length, dim, device, dtype):
    rate = 10000 ** (-torch.arange(dim // 2, device=device, dtype=torch.float64) * 2 / dim)
    angle = torch.arange(length, device=device, dtype=torch.float64).outer(rate)
    return torch.cat((angle.sin(), angle.cos()), -1).to(dtype)


class Attend(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context, allowed=None):
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        sim = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        if allowed is not None:
            sim = sim.masked_fill(~allowed, torch.finfo(sim.dtype).min)
        out = torch.einsum("bhij,bjhd->bihd", sim.softmax(-1), v)
        return self.to_out(out.flatten(-2))


def mlp(dim, hidden):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim))


class Encoder(nn.Module):
    def __init__(self, dim, heads, hidden, depth):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(dim), Attend(dim, heads), nn.LayerNorm(dim), mlp(dim, hidden)])
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask):
        allowed = None if mask is None else mask[:, None, None, :]
        for norm1, attend, norm2, feed in self.layers:
            h = norm1(x)
            x = x + attend(h, h, allowed)
            x = x + feed(norm2(x))
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, dim, heads, hidden, depth):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(dim), Attend(dim, heads), nn.LayerNorm(dim), Attend(dim, heads), nn.LayerNorm(dim), mlp(dim, hidden)]
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask, memory, memory_mask):
        allowed = causal_mask(x.shape[0], x.shape[1], x.device)
        if mask is not None:
            allowed &= mask[:, None, None, :]
        seen = None if memory_mask is None else memory_mask[:, None, None, :]
        for norm1, attend, norm2, cross, norm3, feed in self.layers:
            h = norm1(x)
            x = x + attend(h, h, allowed)
            x = x + cross(norm2(x), memory, seen)
            x = x + feed(norm3(x))
        return self.norm(x)


class Seq2Seq(nn.Module):
    def __init__(self, *, vocab, dim, heads, hidden, depth):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.encoder = Encoder(dim, heads, hidden, depth)
        self.decoder = Decoder(dim, heads, hidden, depth)
        self.logits = nn.Linear(dim, vocab)

    def forward(self, source, target, source_mask=None, target_mask=None):
        x = self.place(self.source(source) * self.source.embedding_dim**0.5)
        y = self.place(self.target(target) * self.target.embedding_dim**0.5)
        memory = self.encoder(x, source_mask)
        return self.logits(self.decoder(y, target_mask, memory, source_mask))

    @staticmethod
    def place(x):
        return x + marian_positions(x.shape[1], x.shape[2], x.device, x.dtype)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq",
    build=lambda c: Seq2Seq(vocab=c.vocab_size, dim=c.d_model, heads=c.num_heads, hidden=c.d_ff, depth=c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    domain={"d_model": (8, 16, 32)},
    declares={
        "causal": True,
        "encodes_source": True,
        "cross_attention": True,
        "positions": "sinusoidal",
        "layout": "halves",
        "base": 10000,
        "beyond_max_len": "works",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": True,
        "tied": False,
        "memory": "quadratic",
        "padding_side": "right",
        "structure": "textbook",
    },
)
