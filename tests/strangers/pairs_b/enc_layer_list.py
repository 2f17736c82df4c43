"""An encoder of num_layers independent post-LN layers."""
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


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.dropout)
        self.ffn = FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, allowed):
        x = self.n1(x + self.drop(self.attention(x, x, allowed)))
        return self.n2(x + self.drop(self.ffn(x)))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.dropout)
        self.cross = Attention(c.d_model, c.num_heads, c.dropout)
        self.ffn = FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, memory, allowed, seen):
        x = self.n1(x + self.drop(self.attention(x, x, allowed)))
        x = self.n2(x + self.drop(self.cross(x, memory, seen)))
        return self.n3(x + self.drop(self.ffn(x)))


class Encoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        if bad:
            self.layers = nn.ModuleList([EncoderLayer(c)] * c.num_layers)
        else:
            self.layers = nn.ModuleList([EncoderLayer(c) for _ in range(c.num_layers)])

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens) * self.tok.embedding_dim ** 0.5
        x = x + sinusoid(x.size(1), x.size(2), x)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return x


def subject(bad):
    return Subject(
        kind="encoder", build=lambda c: Encoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        domain={"num_layers": [2, 3]},
        declares={"shared_layers": False, "stacked": True, "causal": False, "norm_placement": "post", "positions": "sinusoidal"})


right, wrong = subject(False), subject(True)
WHAT = "The list of layers is built by multiplication, so that all of them are one and the same module, although the layers are declared independent."
PLACE = "stack of layers (one module used for all)"
