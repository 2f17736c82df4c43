WHAT = "All decoder layers keep their cross-attention's keys and values under one name in the incremental state, so that layers after the first take those of other layers, line 68."
"""Encoder-decoder with incremental state (fairseq manner), post-norm as in Vaswani et al."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(start, length, dim, like):
    position = torch.arange(start, start + length, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : dim // 2]
    return table.to(like)


class MultiheadAttention(nn.Module):
    def __init__(self, dim, heads, name):
        super().__init__()
        self.heads, self.name = heads, name
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, query, key, allowed=None, incremental_state=None, static_kv=False):
        saved = None if incremental_state is None else incremental_state.get(self.name)
        if static_kv and saved is not None:
            k, v = saved
        else:
            k, v = self.split(self.k_proj(key)), self.split(self.v_proj(key))
            if saved is not None:
                k, v = torch.cat([saved[0], k], dim=2), torch.cat([saved[1], v], dim=2)
        if incremental_state is not None:
            incremental_state[self.name] = (k, v)
        scores = self.split(self.q_proj(query)) @ k.transpose(2, 3) / math.sqrt(k.size(-1))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, index):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads, f"encoder.{index}.self_attn")
        self.ffn = FeedForward(dim, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, allowed):
        x = self.norm1(x + self.self_attn(x, x, allowed))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, index):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads, f"decoder.{index}.self_attn")
        self.encoder_attn = MultiheadAttention(dim, heads, "decoder.encoder_attn")
        self.ffn = FeedForward(dim, hidden)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, memory, allowed, memory_allowed, state):
        x = self.norm1(x + self.self_attn(x, x, allowed, state))
        x = self.norm2(x + self.encoder_attn(x, memory, memory_allowed, state, static_kv=True))
        return self.norm3(x + self.ffn(x))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim = c.d_model
        self.source_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.target_tokens = nn.Embedding(c.vocab_size, c.d_model)
        arguments = (c.d_model, c.num_heads, c.d_ff)
        self.encoder = nn.ModuleList([EncoderLayer(*arguments, i) for i in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(*arguments, i) for i in range(c.num_layers)])
        self.generator = nn.Linear(c.d_model, c.vocab_size)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * math.sqrt(self.dim)
        return x + sinusoids(start, tokens.size(1), self.dim, x)

    def encode(self, source, source_mask=None):
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(self.source_tokens, source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return x

    def decode(self, target, memory, source_mask=None, target_mask=None, state=None, start=0):
        new = target.size(1)
        at = torch.arange(start + new, device=target.device)
        allowed = at[None, :] <= at[start:, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        memory_allowed = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(self.target_tokens, target, start)
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed, state)
        return self.generator(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)


def cache(model, source, chunks):
    memory, state, start, outputs = model.encode(source), {}, 0, []
    for chunk in chunks:
        outputs.append(model.decode(chunk, memory, state=state, start=start))
        start += chunk.size(1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="encoder-decoder with incremental state",
    build=Transformer,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cache,
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "padding_side": "right",
    },
)
