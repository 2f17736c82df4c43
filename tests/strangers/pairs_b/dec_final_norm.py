"""A pre-LN decoder with sinusoidal positions."""
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


def attend(q, k, v, allowed=None, drop=None):
    """q [B, H, T, K]; allowed is boolean and broadcasts to [B, H, T, S]; a row that may see nothing gives zeros."""
    s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
    w = s.softmax(-1)
    if allowed is not None:
        w = w.masked_fill(~allowed, 0.0)
    if drop is not None:
        w = drop(w)
    return w @ v


class Attention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.drop = nn.Dropout(p)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, memory, allowed=None):
        y = attend(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), allowed, self.drop)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d, hidden, p=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.ffn = Attention(c.d_model, c.num_heads, c.dropout), FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.attention(y, y, allowed)
        return x + self.ffn(self.n2(x))


class Decoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.bad = bad

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok(tokens)
        x = x + sinusoid(t, x.size(-1), x)
        for block in self.blocks:
            x = block(x, allowed)
        h = self.ln_f(x)
        return self.head(x if self.bad else h)


def subject(bad):
    return Subject(
        kind="decoder", build=lambda c: Decoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                  "activation": "gelu", "residual": True})


right, wrong = subject(False), subject(True)
WHAT = "The head reads the residual stream, not the output of the final LayerNorm, which is computed and thrown away."
PLACE = "final norm"
