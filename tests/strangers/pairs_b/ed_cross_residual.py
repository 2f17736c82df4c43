"""A pre-LN encoder-decoder in the style of BART's successors: learned positions on both sides."""
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


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.ffn = Attention(c.d_model, c.num_heads, c.dropout), FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, seen):
        h = self.n1(x)
        x = x + self.attention(h, h, seen)
        return x + self.ffn(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.attention, self.cross = Attention(c.d_model, c.num_heads, c.dropout), Attention(c.d_model, c.num_heads, c.dropout)
        self.ffn = FeedForward(c.d_model, c.d_ff, c.dropout)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.bad = bad

    def forward(self, x, memory, allowed, seen):
        h = self.n1(x)
        x = x + self.attention(h, h, allowed)
        h = self.n2(x)
        x = (h if self.bad else x) + self.cross(h, memory, seen)
        h = self.n3(x)
        return x + self.ffn(h)


class Model(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_e, self.pos_d = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c, bad) for _ in range(c.num_layers))
        self.norm_e, self.norm_d = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        x = self.tok(source) + self.pos_e(torch.arange(source.size(1), device=source.device))
        for layer in self.encoder:
            x = layer(x, seen)
        memory, t = self.norm_e(x), target.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        y = self.tok(target) + self.pos_d(torch.arange(t, device=target.device))
        for layer in self.decoder:
            y = layer(y, memory, allowed, seen)
        return self.head(self.norm_d(y))


def subject(bad):
    return Subject(kind="encoder_decoder", build=lambda c: Model(c, bad),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "residual": True,
                             "final_norm": True, "activation": "gelu", "padding_side": "right"})


right, wrong = subject(False), subject(True)
WHAT = "The residual connection around the decoder's cross-attention starts from the normalised input instead of the input, so that the residual stream is cut there."
PLACE = "residual connection of the cross-attention sublayer"
