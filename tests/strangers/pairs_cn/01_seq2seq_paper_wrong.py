"""Attention is all you need, sections 3.1 to 3.5, typed in one sitting."""
import math

import torch
import torch.nn as nn
from veriformer.properties import Subject


def attention(query, key, value, keep):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~keep, 0.0) @ value


class MultiHead(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, mem, keep):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(mem)), self.split(self.wv(mem))
        return self.wo(attention(q, k, v, keep).transpose(1, 2).flatten(2))


class Sub(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x)))"""

    def __init__(self, d, p):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(p)

    def forward(self, x, y):
        return self.norm(x + self.drop(y))


def ffn(d, f):
    return nn.Sequential(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.att, self.ff = MultiHead(d, h), ffn(d, f)
        self.s1, self.s2 = Sub(d, p), Sub(d, p)

    def forward(self, x, keep):
        x = self.s1(x, self.att(x, x, keep))
        return self.s2(x, self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.own, self.cross, self.ff = MultiHead(d, h), MultiHead(d, h), ffn(d, f)
        self.s1, self.s2, self.s3 = Sub(d, p), Sub(d, p), Sub(d, p)

    def forward(self, y, mem, own_keep, cross_keep):
        y = self.s1(y, self.own(y, y, own_keep))
        y = self.s2(y, self.cross(y, mem, cross_keep))
        return self.s3(y, self.ff(y))


def sinusoids(length, d, like):
    pos = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    i = torch.arange(0, d, 2, dtype=torch.float64, device=like.device)
    angle = pos * 10000.0 ** (-i / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :d].to(like.dtype)


class Transformer(nn.Module):
    def __init__(self, vocab, d, h, layers, f, p):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.enc = nn.ModuleList(EncoderLayer(d, h, f, p) for _ in range(layers))
        self.dec = nn.ModuleList(DecoderLayer(d, h, f, p) for _ in range(layers))
        self.drop, self.out, self.d = nn.Dropout(p), nn.Linear(d, vocab), d

    def embed(self, table, ids):
        x = table(ids) * math.sqrt(self.d)
        return self.drop(x + sinusoids(ids.size(1), self.d, x))

    def encode(self, source, source_real):
        keep = source_real[:, None, :, None]
        x = self.embed(self.src, source)
        for layer in self.enc:
            x = layer(x, keep)
        return x

    def decode(self, target, mem, source_real, target_real):
        t = target.size(1)
        own = torch.ones(t, t, dtype=torch.bool, device=target.device).tril() & target_real[:, None, None]
        y = self.embed(self.tgt, target)
        for layer in self.dec:
            y = layer(y, mem, own, source_real[:, None, None])
        return y

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        target_mask = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask
        return self.out(self.decode(target, self.encode(source, source_mask), source_mask, target_mask))


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq of the paper",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "embedding_scale": True,
        "padding_side": "right",
    },
)

WHAT = (
    'Line 87: in the encoder the padding mask of the source is laid along the queries, not along the keys, so that real source words attend to padding.'
)
