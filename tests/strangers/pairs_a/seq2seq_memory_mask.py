import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "The source mask is used in the encoder but not handed to the decoder's cross-attention, so padded "
    'source positions are attended by the target.'
)
PLACE = 'source padding mask in the cross-attention of the encoder-decoder'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def rope(x, positions):
    """Rotates channel i of x [B, H, T, K] against channel i + K/2."""
    half = x.size(-1) // 2
    exact = torch.promote_types(x.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = positions.to(exact)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, allowed=None):
        at = torch.arange(x.size(1), device=x.device)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attend(rope(q, at), rope(k, at), v, allowed).transpose(1, 2).flatten(2))


def feed_forward(c):
    return nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn, self.ff = SelfAttention(c.d_model, c.num_heads), feed_forward(c)

    def forward(self, x, allowed=None):
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.ff(self.norm2(x))


class CrossAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, allowed=None):
        q = self.q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.attn, self.ff = SelfAttention(c.d_model, c.num_heads), feed_forward(c)
        self.cross = CrossAttention(c.d_model, c.num_heads)

    def forward(self, x, memory, allowed=None, memory_allowed=None):
        x = x + self.attn(self.norm1(x), allowed)
        x = x + self.cross(self.norm2(x), memory, memory_allowed)
        return x + self.ff(self.norm3(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, seen)
        memory = self.norm1(memory)
        T = target.size(1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, allowed, seen)
        return self.head(self.norm2(x))


class CrossAttention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, allowed=None):
        q = self.q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class DecoderLayer2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.attn, self.ff = SelfAttention(c.d_model, c.num_heads), feed_forward(c)
        self.cross = CrossAttention2(c.d_model, c.num_heads)

    def forward(self, x, memory, allowed=None, memory_allowed=None):
        x = x + self.attn(self.norm1(x), allowed)
        x = x + self.cross(self.norm2(x), memory, memory_allowed)
        return x + self.ff(self.norm3(x))


class Seq2Seq2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer2(c) for _ in range(c.num_layers))
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, seen)
        memory = self.norm1(memory)
        T = target.size(1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, allowed)
        return self.head(self.norm2(x))


right = Subject(
    kind="encoder_decoder",
    build=lambda c: Seq2Seq(c),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "relu", "final_norm": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="encoder_decoder",
    build=lambda c: Seq2Seq2(c),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "relu", "final_norm": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)
