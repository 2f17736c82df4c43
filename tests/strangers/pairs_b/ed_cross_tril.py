"""A pre-LN encoder-decoder; one helper makes the masks of both attentions of the decoder."""
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


def make_mask(queries, keys, keep, causal):
    """[B or 1, 1, T, S], True where a key may be seen."""
    allowed = torch.ones(queries.size(1), keys.size(1), dtype=torch.bool, device=queries.device)
    if causal:
        allowed = allowed.tril()
    allowed = allowed[None, None]
    return allowed if keep is None else allowed & keep[:, None, None, :]


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.attention, self.n1 = Attention(c.d_model, c.num_heads, c.dropout), nn.LayerNorm(c.d_model)
        self.ffn, self.n3 = FeedForward(c.d_model, c.d_ff, c.dropout), nn.LayerNorm(c.d_model)
        if cross:
            self.cross, self.n2 = Attention(c.d_model, c.num_heads, c.dropout), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed, memory=None, seen=None):
        y = self.n1(x)
        x = x + self.attention(y, y, allowed)
        if memory is not None:
            x = x + self.cross(self.n2(x), memory, seen)
        return x + self.ffn(self.n3(x))


class Seq2Seq(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.num_layers))
        self.n_enc, self.n_dec = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)
        self.cross_causal = bad

    def forward(self, source, target, source_mask=None, target_mask=None):
        x, y = self.tok(source), self.tok(target)
        x, y = x + sinusoid(x.size(1), x.size(2), x), y + sinusoid(y.size(1), y.size(2), y)
        allowed = make_mask(source, source, source_mask, False)
        for layer in self.encoder:
            x = layer(x, allowed)
        memory = self.n_enc(x)
        allowed = make_mask(target, target, target_mask, True)
        seen = make_mask(target, source, source_mask, self.cross_causal)
        for layer in self.decoder:
            y = layer(y, allowed, memory, seen)
        return self.head(self.n_dec(y))


def subject(bad):
    return Subject(kind="encoder_decoder", build=lambda c: Seq2Seq(c, bad),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre",
                             "final_norm": True, "activation": "gelu"})


right, wrong = subject(False), subject(True)
WHAT = "The causal mask is applied in the cross-attention too: target position t sees the source positions 0 to t alone."
PLACE = "cross-attention mask"
