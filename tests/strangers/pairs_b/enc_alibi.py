"""A bidirectional encoder with ALiBi: the penalty grows with the distance on both sides."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.bad = c.num_heads, bad
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x, attention_mask):
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        t = torch.arange(x.size(1), device=x.device)
        distance = t[None, :] - t[:, None]
        if not self.bad:
            distance = -distance.abs()
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.h + 1, device=x.device) / self.h)
        s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + slopes.to(x.dtype)[:, None, None] * distance
        if attention_mask is not None:
            hidden = ~attention_mask[:, None, None, :]
            w = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        else:
            w = s.softmax(-1)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.attention = Attention(c, bad)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, attention_mask):
        x = x + self.attention(self.n1(x), attention_mask)
        return x + self.mlp(self.n2(x))


class Encoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, bad) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.norm(x)


def subject(bad):
    return Subject(
        kind="encoder", build=lambda c: Encoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        domain={"num_heads": [2, 4]},
        declares={"causal": False, "positions": "alibi", "norm_placement": "pre", "final_norm": True, "activation": "relu"})


right, wrong = subject(False), subject(True)
WHAT = "The ALiBi bias is slope * (key - query) without the absolute value: keys ahead are rewarded the more the farther they are, instead of penalised."
PLACE = "ALiBi position bias (sign for later keys)"
