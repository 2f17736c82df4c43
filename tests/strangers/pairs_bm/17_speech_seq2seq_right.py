"""Speech units to text: encoder-decoder with sinusoids; decoding keeps self- and cross-attention keys in the modules."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(start, length, dim, like):
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)[:, None]
    even = torch.arange(0, dim, 2, dtype=like.dtype, device=like.device)
    angle = t * torch.exp(-math.log(10000.0) * even / dim)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :dim]


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)

    def mix(self, x, k, v, allowed):
        q = self.heads(self.q(x))
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if allowed is not None:
            s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SelfAttention(MHA):
    past = None

    def forward(self, x, allowed=None, incremental=False):
        k, v = self.heads(self.k(x)), self.heads(self.v(x))
        if incremental:
            if self.past is not None:
                k, v = torch.cat((self.past[0], k), 2), torch.cat((self.past[1], v), 2)
            self.past = (k, v)
            allowed = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device)
            allowed = allowed.tril(k.shape[2] - x.shape[1])
        return self.mix(x, k, v, allowed)


class CrossAttention(MHA):
    past = None

    def forward(self, x, memory, allowed=None, incremental=False):
        if not incremental:
            return self.mix(x, self.heads(self.k(memory)), self.heads(self.v(memory)), allowed)
        if self.past is None or self.past[0].shape[::2] != memory.shape[:2]:
            self.past = (self.heads(self.k(memory)), self.heads(self.v(memory)))  # once, not at every step
        return self.mix(x, *self.past, allowed)


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, allowed):
        x = x + self.attn(self.n1(x), allowed)
        return x + self.ff(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.cross = SelfAttention(d, h), CrossAttention(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, memory, allowed, memory_allowed, incremental=False):
        x = x + self.attn(self.n1(x), allowed, incremental)
        x = x + self.cross(self.n2(x), memory, memory_allowed, incremental)
        return x + self.ff(self.n3(x))


class Speech2Text(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.units, self.text = nn.Embedding(c.vocab_size, self.d), nn.Embedding(c.vocab_size, self.d)
        self.encoder = nn.ModuleList([EncoderLayer(self.d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(self.d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.enc_norm, self.dec_norm = nn.LayerNorm(self.d), nn.LayerNorm(self.d)
        self.head = nn.Linear(self.d, c.vocab_size, bias=False)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * math.sqrt(self.d)
        return x + sinusoids(start, tokens.shape[1], self.d, x)

    def encode(self, source, source_mask=None):
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(self.units, source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.enc_norm(x), allowed

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_allowed = self.encode(source, source_mask)
        allowed = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.embed(self.text, target)
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed)
        return self.head(self.dec_norm(x))

    def begin(self):
        for module in self.decoder.modules():
            if isinstance(module, (SelfAttention, CrossAttention)):
                module.past = None

    def incremental(self, source, chunks):
        self.begin()
        memory, _ = self.encode(source)
        done, out = 0, []
        for chunk in chunks:
            x = self.embed(self.text, chunk, done)
            for layer in self.decoder:
                x = layer(x, memory, None, None, incremental=True)
            done += chunk.shape[1]
            out.append(self.head(self.dec_norm(x)))
        return torch.cat(out, 1)


subject = Subject(
    kind="encoder_decoder",
    name="speech2text",
    build=Speech2Text,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={"positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "relu", "tied": False, "padding_side": "right"},
)
