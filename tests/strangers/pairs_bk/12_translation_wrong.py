WHAT = "reset_cache() forgets the cross-attention: keys and values of the memory of the last source are used again for the next one of the same shape (line 123)."
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(length, width, like):
    pos = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    rate = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    table = torch.zeros(length, width, dtype=torch.float64, device=like.device)
    table[:, 0::2] = torch.sin(pos * rate)
    table[:, 1::2] = torch.cos(pos * rate)[:, : width // 2]
    return table.to(like.dtype)


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.prev = None  # keys and values of earlier calls, while decoding step by step

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.h, -1).transpose(1, 2)

    def attend(self, q, k, v, allowed):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, memory, allowed=None):
        return self.attend(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), allowed)

    def step_self(self, x):
        k, v = self.split(self.k(x)), self.split(self.v(x))
        if self.prev is not None:
            k, v = torch.cat([self.prev[0], k], 2), torch.cat([self.prev[1], v], 2)
        self.prev = k, v
        t, s = x.size(1), k.size(2)
        allowed = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        return self.attend(self.split(self.q(x)), k, v, allowed)

    def step_cross(self, x, memory):
        stored = self.prev
        if stored is None or stored[0].size(0) != memory.size(0) or stored[0].size(2) != memory.size(1):
            self.prev = self.split(self.k(memory)), self.split(self.v(memory))
        return self.attend(self.split(self.q(x)), *self.prev, None)


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attn(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, allowed):
        n = self.n1(x)
        x = x + self.attn(n, n, allowed)
        return x + self.ff(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.self_attn, self.cross_attn = Attn(d, h), Attn(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, memory, allowed, memory_allowed):
        n = self.n1(x)
        x = x + self.self_attn(n, n, allowed)
        x = x + self.cross_attn(self.n2(x), memory, memory_allowed)
        return x + self.ff(self.n3(x))

    def step(self, x, memory):
        x = x + self.self_attn.step_self(self.n1(x))
        x = x + self.cross_attn.step_cross(self.n2(x), memory)
        return x + self.ff(self.n3(x))


class Translator(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.scale = math.sqrt(d)
        self.src_embed, self.tgt_embed = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.enc_norm, self.dec_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.generator = nn.Linear(d, c.vocab_size)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * self.scale
        return x + sinusoids(start + tokens.size(1), x.size(-1), x)[start:]

    def encode(self, source, source_mask=None):
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(self.src_embed, source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.enc_norm(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encode(source, source_mask)
        memory_allowed = None if source_mask is None else source_mask[:, None, None, :]
        t = target.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.embed(self.tgt_embed, target)
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed)
        return self.generator(self.dec_norm(x))

    def reset_cache(self):
        for layer in self.decoder:
            layer.self_attn.prev = None

    def incremental(self, source, chunks):
        self.reset_cache()
        memory, start, outputs = self.encode(source), 0, []
        for chunk in chunks:
            x = self.embed(self.tgt_embed, chunk, start)
            for layer in self.decoder:
                x = layer.step(x, memory)
            outputs.append(self.generator(self.dec_norm(x)))
            start += chunk.size(1)
        return torch.cat(outputs, 1)


def cache(model, source, chunks):
    with torch.no_grad():
        return model.incremental(source, chunks)


subject = Subject(
    kind="encoder_decoder",
    build=Translator,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    cache=cache,
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "tied": False,
    },
)
