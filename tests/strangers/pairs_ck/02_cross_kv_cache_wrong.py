"""Encoder-decoder; the projections of the memory are computed once per sequence when decoding."""
import torch
from torch import nn

from veriformer.properties import Subject


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)

    def kv(self, x):
        return self.split(self.k(x)), self.split(self.v(x))

    def forward(self, x, kv, allowed=None):
        k, v = kv
        q = self.split(self.q(x))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self, d, f):
        super().__init__(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn, self.mlp = MHA(c.d_model, c.num_heads), MLP(c.d_model, c.d_ff)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.attn(y, self.attn.kv(y), allowed)
        return x + self.mlp(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index = index
        self.attn, self.cross, self.mlp = MHA(c.d_model, c.num_heads), MHA(c.d_model, c.num_heads), MLP(c.d_model, c.d_ff)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def forward(self, x, memory, allowed, memory_allowed, store):
        y = self.n1(x)
        k, v = self.attn.kv(y)
        slot = ("self", self.index)
        if slot in store:
            k, v = torch.cat([store[slot][0], k], 2), torch.cat([store[slot][1], v], 2)
        store[slot] = (k, v)
        x = x + self.attn(y, (k, v), allowed)
        slot = "memory"
        if slot not in store:
            store[slot] = self.cross.kv(memory)
        x = x + self.cross(self.n2(x), store[slot], memory_allowed)
        return x + self.mlp(self.n3(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.where = nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_layers))
        self.ne, self.nd = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def at(self, start, length):
        return self.where(torch.arange(start, start + length, device=self.where.weight.device))

    def encode(self, source, mask=None):
        allowed = None if mask is None else mask[:, None, None]
        x = self.source(source) + self.at(0, source.shape[1])
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.ne(x)

    def decode(self, target, memory, memory_mask=None, target_mask=None, cache=None, start=0):
        T = target.shape[1]
        x = self.target(target) + self.at(start, T)
        allowed = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None]
        memory_allowed = None if memory_mask is None else memory_mask[:, None, None]
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed, {} if cache is None else cache)
        return self.head(self.nd(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)


def cached(model, source, chunks):
    memory, cache, start, out = model.encode(source), {}, 0, []
    for chunk in chunks:
        out.append(model.decode(chunk, memory, cache=cache, start=start))
        start += chunk.shape[1]
    return torch.cat(out, 1)


subject = Subject(
    kind="encoder_decoder",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cached,
    declares={"positions": "learned", "norm_placement": "pre", "activation": "relu", "padding_side": "right"},
)

WHAT = 'Line 61: the cached keys and values of the memory are stored under one name for all layers, so that with a cache every layer crosses to the projections of the first. The uncached forward makes a fresh store a layer and is right.'
