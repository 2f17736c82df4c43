"""Transformers are RNNs (Katharopoulos et al., 2020): attention with elu + 1 features, linear in the length."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(length, d, like, start=0):
    """The table of 'Attention is all you need', rows start .. start + length - 1."""
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)[:, None]
    f = torch.exp(-math.log(10000.0) * torch.arange(0, d, 2, dtype=like.dtype, device=like.device) / d)
    return torch.stack([(t * f).sin(), (t * f).cos()], -1).flatten(1)[:, :d]


class LinearAttention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.bad = c.num_heads, bad
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def forward(self, x, attention_mask):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if attention_mask is not None:
            real = attention_mask[:, :, None, None].to(x.dtype)
            if self.bad:
                v = v * real
            else:
                k = k * real
        summary = torch.einsum("bshk,bshe->bhke", k, v)
        total = torch.einsum("bthk,bhk->bth", q, k.sum(1))
        y = torch.einsum("bthk,bhke->bthe", q, summary) / (total + 1e-6)[..., None]
        return self.o(y.flatten(2))


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.attention = LinearAttention(c, bad)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

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
        x = x + sinusoid(x.size(1), x.size(2), x)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.norm(x)


def subject(bad):
    return Subject(kind="encoder", build=lambda c: Encoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The padding mask zeroes the values but not the keys, so that padded keys still count in the normaliser of the linear attention."
PLACE = "linear attention (padding in the denominator)"
