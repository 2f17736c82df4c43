"""A Perceiver classifier (Jaegle et al. 2021): a few latents read the inputs again and again, Fourier features say where."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

BANDS, LATENTS = 4, 3


def exists(value):
    return value is not None


def fourier_encode(coordinates, bands=BANDS):
    """[T] in [-1, 1] -> [T, 2 * bands + 1]: sines, cosines and the coordinate itself."""
    scales = torch.linspace(1.0, 8.0, bands, dtype=coordinates.dtype, device=coordinates.device)
    angles = coordinates[:, None] * scales * math.pi
    return torch.cat([angles.sin(), angles.cos(), coordinates[:, None]], -1)


class PreNorm(nn.Module):
    def __init__(self, dim, fn, context_dim=None):
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(context_dim) if exists(context_dim) else None

    def forward(self, x, context=None, **kwargs):
        if exists(self.norm_context):
            kwargs["context"] = self.norm_context(context)
        return self.fn(self.norm(x), **kwargs)


class Attention(nn.Module):
    def __init__(self, query_dim, heads, context_dim=None):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(query_dim, query_dim, bias=False)
        self.to_kv = nn.Linear(context_dim or query_dim, 2 * query_dim, bias=False)
        self.to_out = nn.Linear(query_dim, query_dim)

    def forward(self, x, context=None, mask=None):
        context = context if exists(context) else x
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        if exists(mask):
            sim = sim.masked_fill(~mask[:, None, None, :], torch.finfo(sim.dtype).min)
        return self.to_out(torch.einsum("bhij,bjhd->bihd", sim.softmax(-1), v).flatten(2))


def feed_forward(dim, inner):
    return nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))


class Perceiver(nn.Module):
    def __init__(self, c, coordinates):
        super().__init__()
        dim, wide = c.d_model, c.d_model + 2 * BANDS + 1
        self.max_len, self.coordinates = c.max_len, coordinates
        self.tokens = nn.Embedding(c.vocab_size, dim)
        self.latents = nn.Parameter(torch.randn(LATENTS, dim))
        self.reads = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        PreNorm(dim, Attention(dim, c.num_heads, wide), wide),
                        PreNorm(dim, feed_forward(dim, c.d_ff)),
                        PreNorm(dim, Attention(dim, c.num_heads)),
                        PreNorm(dim, feed_forward(dim, c.d_ff)),
                    ]
                )
                for _ in range(c.num_layers)
            ]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, c.num_classes))

    def forward(self, tokens, mask=None):
        if tokens.shape[1] > self.max_len:
            raise ValueError(f"longer than {self.max_len}")
        data = self.tokens(tokens)
        where = self.coordinates(tokens.shape[1], self.max_len).to(tokens.device)
        code = fourier_encode(where).to(data.dtype)
        data = torch.cat([data, code.expand(len(data), -1, -1)], -1)
        x = self.latents.expand(len(data), -1, -1)
        for cross_attention, cross_ff, self_attention, self_ff in self.reads:
            x = x + cross_attention(x, context=data, mask=mask)
            x = x + cross_ff(x)
            x = x + self_attention(x)
            x = x + self_ff(x)
        return self.to_logits(x.mean(1))


def of_the_longest(length, max_len):
    return torch.linspace(-1.0, 1.0, max_len, dtype=torch.float64)[:length]


def of_the_batch(length, max_len):
    return torch.linspace(-1.0, 1.0, length, dtype=torch.float64)


def subject(name, coordinates):
    return Subject(
        kind="classifier",
        name=name,
        build=lambda c: Perceiver(c, coordinates),
        forward=lambda m, tokens, attention_mask=None: m(tokens, None if attention_mask is None else attention_mask.bool()),
        declares={"padding_side": "right", "structure": "other"},
    )


right = subject("perceiver", of_the_longest)
wrong = subject("perceiver, stretched", of_the_batch)

WHAT = "The coordinates that are Fourier encoded stretch over the padded length of the batch, not over a fixed grid."
CAUSE = (
    "linspace(-1, 1, T) takes T from the tensor, padding included: the same real tokens get other positions the more padding "
    "stands behind them, although the padding itself is masked everywhere."
)
