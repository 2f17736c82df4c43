WHAT = "the projected source is cached under one key for all layers, so in cached decoding every layer attends with the keys and values of the first (line 82)"
"""Encoder-decoder (pre-norm) with incremental decoding: keys and values of the source are projected once a layer."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(start, length, width, like):
    pos = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None]
    channel = torch.arange(width, device=like.device)
    angle = pos / 10000.0 ** ((channel - channel % 2).double() / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, memory):
        return self.split(self.k(memory)), self.split(self.v(memory))

    def forward(self, x, keys, values, allowed=None):
        queries = self.split(self.q(x))
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0.0)
        return self.o((weights @ values).transpose(1, 2).flatten(2))


def mlp(d, hidden):
    return nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, d))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.att, self.ff = Attention(c.d_model, c.num_heads), mlp(c.d_model, c.d_ff)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.att(y, *self.att.keys_values(y), allowed)
        return x + self.ff(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index = index
        self.n1, self.n2, self.n3 = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.att, self.cross = Attention(c.d_model, c.num_heads), Attention(c.d_model, c.num_heads)
        self.ff = mlp(c.d_model, c.d_ff)

    def forward(self, x, memory, source_allowed, target_allowed, state=None):
        y = self.n1(x)
        k, v = self.att.keys_values(y)
        if state is not None:
            if ("self", self.index) in state:
                past_k, past_v = state["self", self.index]
                k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
            state["self", self.index] = k, v
        allowed = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - x.shape[1])
        if target_allowed is not None:
            allowed = allowed & target_allowed
        x = x + self.att(y, k, v, allowed)

        if state is None:
            k, v = self.cross.keys_values(memory)
        else:
            key = "cross"
            if key not in state:
                state[key] = self.cross.keys_values(memory)
            k, v = state[key]
        x = x + self.cross(self.n2(x), k, v, source_allowed)
        return x + self.ff(self.n3(x))


class Captioner(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.encoder_norm = nn.LayerNorm(c.d_model)
        self.decoder = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_layers))
        self.decoder_norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, mask=None):
        x = self.source(source)
        x = x + sinusoids(0, x.shape[1], x.shape[2], x)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    def decode(self, memory, target, source_mask=None, target_mask=None, state=None, start=0):
        x = self.target(target)
        x = x + sinusoids(start, x.shape[1], x.shape[2], x)
        for layer in self.decoder:
            x = layer(x, memory, source_mask, target_mask, state)
        return self.head(self.decoder_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = None if source_mask is None else source_mask[:, None, None]
        target_mask = None if target_mask is None else target_mask[:, None, None]
        return self.decode(self.encode(source, source_mask), target, source_mask, target_mask)

    def incremental(self, source, chunks):
        memory, state, start, out = self.encode(source), {}, 0, []
        for chunk in chunks:
            out.append(self.decode(memory, chunk, state=state, start=start))
            start += chunk.shape[1]
        return torch.cat(out, 1)


subject = Subject(
    kind="encoder_decoder",
    name="captioner",
    build=Captioner,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
