"""A Gemma-2-like decoder: scores capped softly at 4, RMSNorm, no biases."""
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


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, c, bad, cap=4.0):
        super().__init__()
        self.h, self.cap, self.bad = c.num_heads, cap, bad
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.o = nn.Linear(c.d_model, c.d_model, bias=False)

    def forward(self, x, allowed):
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        low = torch.finfo(s.dtype).min
        if self.bad:
            s = s.masked_fill(~allowed, low)
            s = self.cap * torch.tanh(s / self.cap)
            w = s.softmax(-1)
        else:
            s = self.cap * torch.tanh(s / self.cap)
            w = s.masked_fill(~allowed, low).softmax(-1).masked_fill(~allowed, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.attention = Attention(c, bad)
        self.n1, self.n2 = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, allowed):
        x = x + self.attention(self.n1(x), allowed)
        y = self.n2(x)
        return x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))


class Decoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, bad) for _ in range(c.num_layers))
        self.norm, self.head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok(tokens) * self.tok.embedding_dim ** 0.5
        x = x + sinusoid(t, x.size(-1), x)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def subject(bad):
    return Subject(
        kind="decoder", build=lambda c: Decoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "soft_cap": 4.0, "norm": "rms", "norm_placement": "pre", "final_norm": True, "bias": False,
                  "positions": "sinusoidal", "embedding_scale": True})


right, wrong = subject(False), subject(True)
WHAT = "The soft cap is applied after the mask, so that the scores of hidden keys (future and padding) become -4 instead of minus infinity and leak."
PLACE = "attention scores (order of soft cap and mask)"
