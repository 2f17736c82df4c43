"""A post-LN encoder written with torch.nn.functional throughout."""
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


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.p, self.bad = c.num_heads, c.dropout, bad
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.w1, self.w2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, attention_mask):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.h, -1) for y in self.qkv(x).split(d, -1))
        s = torch.einsum("bthk,bshk->bhts", q, k) / (d // self.h) ** 0.5
        if attention_mask is not None:
            hidden = ~attention_mask[:, None, None, :]
            w = F.softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), -1).masked_fill(hidden, 0.0)
        else:
            w = F.softmax(s, -1)
        w = F.dropout(w, self.p) if self.bad else F.dropout(w, self.p, self.training)
        y = self.o(torch.einsum("bhts,bshk->bthk", w, v).reshape(b, t, d))
        x = self.n1(x + F.dropout(y, self.p, self.training))
        return self.n2(x + F.dropout(self.w2(F.relu(self.w1(x))), self.p, self.training))


class Encoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, bad) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens)
        x = x + sinusoid(x.size(1), x.size(2), x)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


def subject(bad):
    return Subject(kind="encoder", build=lambda c: Encoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The dropout of the attention weights is F.dropout without the training flag and stays on in eval mode."
PLACE = "dropout on the attention weights"
