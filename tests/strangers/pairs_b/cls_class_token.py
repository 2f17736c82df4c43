"""A class token is put before the sequence, and its last state is classified."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


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


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.ffn = Attention(c.d_model, c.num_heads, c.dropout), FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.attention(y, y, allowed)
        return x + self.ffn(self.n2(x))


class Classifier(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len + 1, c.d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, c.d_model) * 0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)
        self.pad = (0, 1) if bad else (1, 0)

    def forward(self, tokens, attention_mask=None):
        x = torch.cat([self.cls.expand(tokens.size(0), -1, -1), self.tok(tokens)], 1)
        x = x + self.pos.weight[: x.size(1)]
        allowed = None
        if attention_mask is not None:
            allowed = F.pad(attention_mask, self.pad, value=True)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(self.norm(x)[:, 0])


def subject(bad):
    return Subject(kind="classifier", build=lambda c: Classifier(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The mask is extended for the class token at its end instead of its beginning, so that it is shifted by one: the last real token is hidden and the last padded position is seen."
PLACE = "padding mask after the class token is put in front"
