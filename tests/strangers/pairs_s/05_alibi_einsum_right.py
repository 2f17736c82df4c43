"""A decoder in einsum with ALiBi, after BLOOM: the bias is slope times key position, which the softmax makes relative."""

import math

import torch
from torch import einsum, nn

from veriformer.properties import Subject


def alibi_slopes(n):
    def of_power(m):
        return [2 ** (-8 * (i + 1) / m) for i in range(m)]

    below = 2 ** math.floor(math.log2(n))
    extra = of_power(2 * below)[0::2][: n - below]
    return of_power(below) + extra


def weight(*shape, fan_in):
    return nn.Parameter(torch.randn(shape) * fan_in**-0.5)


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        k = d // h
        self.heads = h
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = (weight(h, d, k, fan_in=d) for _ in range(3))
        self.o = weight(h, k, d, fan_in=d)
        self.up, self.down = weight(d, f, fan_in=d), weight(f, d, fan_in=f)

    def forward(self, x):
        n = self.norm_a(x)
        q, k, v = (einsum("btd,hdk->bhtk", n, w) for w in (self.q, self.k, self.v))
        place = torch.arange(x.shape[1], device=x.device)
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=x.dtype, device=x.device)
        scores = einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1]) + einsum("h,s->hs", slopes, place)[:, None]
        scores = scores.masked_fill(place[None, :] > place[:, None], -torch.inf)
        x = x + einsum("bhts,bhsk,hkd->btd", scores.softmax(-1), v, self.o)
        hidden = nn.functional.gelu(self.norm_f(x) @ self.up, approximate="tanh")
        return x + hidden @ self.down


class Bloomlet(nn.Module):
    def __init__(self, vocab, d, h, f, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.embed_norm = nn.LayerNorm(d)
        self.layers = nn.Sequential(*(Layer(d, h, f) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens):
        x = self.norm(self.layers(self.embed_norm(self.embed(tokens))))
        return einsum("btd,vd->btv", x, self.embed.weight)


subject = Subject(
    kind="decoder",
    name="bloomlet",
    build=lambda c: Bloomlet(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, tokens: model(tokens),
    domain={"d_model": (24, 48), "num_heads": (2, 3, 6)},
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "tied": True,
        "slopes": "interleaved",
    },
)
