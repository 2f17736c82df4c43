"""Post-norm encoder-decoder as in the paper; for decoding, attention modules store their keys and values themselves."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

START = 1


def sinusoid(start, stop, d_model, like):
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64, device=like.device) / d_model)
    angles = torch.arange(start, stop, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(like.dtype)


class Attention(nn.Module):
    def __init__(self, d_model, num_heads, static=False):
        super().__init__()
        self.num_heads, self.static = num_heads, static
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.store = None

    def reset(self):
        self.store = None

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def keys_values(self, memory, incremental):
        store = self.store if incremental else None
        if store is not None and self.static:
            k = store[0]
            if (k.shape[0], k.shape[2], k.dtype) == (memory.shape[0], memory.shape[1], memory.dtype):
                return store
        k, v = self.heads(self.k(memory)), self.heads(self.v(memory))
        if store is not None and not self.static:
            k, v = torch.cat([store[0], k], dim=2), torch.cat([store[1], v], dim=2)
        if incremental:
            self.store = (k, v)
        return k, v

    def forward(self, x, memory, key_mask=None, causal=False, incremental=False):
        k, v = self.keys_values(memory, incremental)
        T, S = x.shape[1], k.shape[2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device)
        if causal:
            allowed = allowed.tril(S - T)
        if key_mask is not None:
            allowed = allowed & key_mask.bool()[:, None, None, :]
        y = F.scaled_dot_product_attention(self.heads(self.q(x)), k, v, attn_mask=allowed)
        return self.o(y.transpose(1, 2).flatten(2))


def feed_forward(d_model, d_ff):
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attention, self.ffn = Attention(d_model, num_heads), feed_forward(d_model, d_ff)
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        x = self.norm_1(x + self.attention(x, x, mask))
        return self.norm_2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attention = Attention(d_model, num_heads)
        self.cross = Attention(d_model, num_heads, static=True)
        self.ffn = feed_forward(d_model, d_ff)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(d_model) for _ in range(3))

    def reset(self):
        self.attention.reset()
        self.cross.reset()

    def forward(self, x, memory, mask=None, memory_mask=None, incremental=False):
        x = self.norm_1(x + self.attention(x, x, mask, causal=True, incremental=incremental))
        x = self.norm_2(x + self.cross(x, memory, memory_mask, incremental=incremental))
        return self.norm_3(x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        if d_model % 2:
            raise ValueError("d_model must be even")
        self.scale = math.sqrt(d_model)
        self.source, self.target = nn.Embedding(vocab_size, d_model), nn.Embedding(vocab_size, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, num_heads, d_ff) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, num_heads, d_ff) for _ in range(num_layers))
        self.head = nn.Linear(d_model, vocab_size)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * self.scale
        return x + sinusoid(start, start + tokens.shape[1], x.shape[-1], x)

    def encode(self, source, mask=None):
        x = self.embed(self.source, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return x

    def decode(self, target, memory, mask=None, memory_mask=None, start=0, incremental=False):
        x = self.embed(self.target, target, start)
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask, incremental)
        return self.head(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), target_mask, source_mask)

    def begin(self):
        for layer in self.decoder:
            layer.reset()

    @torch.no_grad()
    def stream(self, source, chunks):
        self.begin()
        memory, outputs, start = self.encode(source), [], 0
        for chunk in chunks:
            outputs.append(self.decode(chunk, memory, start=start, incremental=True))
            start += chunk.shape[1]
        return torch.cat(outputs, dim=1)

    @torch.no_grad()
    def generate(self, source, steps, use_cache=True):
        self.begin()
        memory = self.encode(source)
        target = source.new_full((source.shape[0], 1), START)
        for step in range(steps):
            if use_cache:
                logits = self.decode(target[:, -1:], memory, start=step, incremental=True)
            else:
                logits = self.decode(target, memory)
            target = torch.cat([target, logits[:, -1:].argmax(-1)], dim=1)
        return target


subject = Subject(
    kind="encoder_decoder",
    name="sequence to sequence",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    mask_forms=("padding",),
    cache=lambda m, source, chunks: m.stream(source, chunks),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "embedding_scale": True,
        "padding_side": "right",
    },
)
