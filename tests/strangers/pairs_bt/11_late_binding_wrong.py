WHAT = "The encoder's layers are closures over the loop variable (line 84): Python binds it late, so every step runs with the parameters of the last encoder layer and those of all others are never used or trained."
"""Functional encoder-decoder: layers are pure functions of a dictionary of parameters."""
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def table(length, d, like):
    pos = torch.arange(length, dtype=torch.float64)[:, None]
    angle = pos * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    out = torch.zeros(length, d, dtype=torch.float64)
    out[:, 0::2] = angle.sin()
    out[:, 1::2] = angle.cos()[:, : d // 2]
    return out.to(like)


def linear(p, name, x):
    return x @ p[name + "_w"] + p[name + "_b"]


def norm(p, name, x):
    return F.layer_norm(x, x.shape[-1:], p[name + "_g"], p[name + "_b"])


def attention(p, prefix, heads, x, memory, allowed):
    def split(y):
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = split(linear(p, prefix + "q", x)), split(linear(p, prefix + "k", memory)), split(linear(p, prefix + "v", memory))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return linear(p, prefix + "o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def ffn(p, x):
    return linear(p, "down", torch.relu(linear(p, "up", x)))


def encoder_layer(p, heads, x, allowed):
    x = norm(p, "n1", x + attention(p, "self_", heads, x, x, allowed))
    return norm(p, "n2", x + ffn(p, x))


def decoder_layer(p, heads, x, memory, allowed, memory_allowed):
    x = norm(p, "n1", x + attention(p, "self_", heads, x, x, allowed))
    x = norm(p, "n2", x + attention(p, "cross_", heads, x, memory, memory_allowed))
    return norm(p, "n3", x + ffn(p, x))


def init_layer(d, d_ff, cross):
    shapes = {f"self_{n}": (d, d) for n in "qkvo"}
    if cross:
        shapes |= {f"cross_{n}": (d, d) for n in "qkvo"}
    shapes |= {"up": (d, d_ff), "down": (d_ff, d)}
    p = {}
    for name, (i, o) in shapes.items():
        p[name + "_w"] = nn.Parameter(torch.empty(i, o).uniform_(-1, 1) * math.sqrt(6 / (i + o)))
        p[name + "_b"] = nn.Parameter(torch.zeros(o))
    for n in ("n1", "n2", "n3") if cross else ("n1", "n2"):
        p[n + "_g"], p[n + "_b"] = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
    return nn.ParameterDict(p)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff):
        super().__init__()
        self.d, self.heads = d, heads
        self.source, self.target = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.enc = nn.ModuleList([init_layer(d, d_ff, False) for _ in range(layers)])
        self.dec = nn.ModuleList([init_layer(d, d_ff, True) for _ in range(layers)])
        self.out = nn.Linear(d, vocab)

    def encode(self, source, allowed):
        x = self.source(source) * math.sqrt(self.d)
        x = x + table(source.shape[1], self.d, x)
        steps = []
        for params in self.enc:
            steps.append(lambda x, allowed: encoder_layer(params, self.heads, x, allowed))
        for step in steps:
            x = step(x, allowed)
        return x

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.encode(source, seen)
        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        y = self.target(target) * math.sqrt(self.d)
        y = y + table(T, self.d, y)
        for params in self.dec:
            y = decoder_layer(params, self.heads, y, memory, allowed, seen)
        return self.out(y)


subject = Subject(
    kind="encoder_decoder",
    name="functional seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "tied": False,
        "padding_side": "right",
    },
)
