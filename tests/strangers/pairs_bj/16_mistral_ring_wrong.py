WHAT = "A chunk is written into the rolling cache before its queries read from it (line 74): the last tokens of the chunk have overwritten slots that its first tokens still have in their window, so chunks of two or more behind others lose keys."
"""Mistral: grouped queries, a sliding window, and a rolling cache of `window` slots."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x, positions):
    half = x.shape[-1] // 2
    freq = 10000.0 ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = positions.to(x.dtype)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RollingCache:
    """Keys and values of the last WINDOW positions, that of position p in slot p % WINDOW."""

    def __init__(self):
        self.k = self.v = None
        self.positions = None

    def write(self, k, v, positions):
        if self.k is None:
            B, G, _, D = k.shape
            self.k, self.v = k.new_zeros(B, G, WINDOW, D), v.new_zeros(B, G, WINDOW, D)
            self.positions = positions.new_full((WINDOW,), -(10**6))  # empty: out of every window
        k, v, positions = k[:, :, -WINDOW:], v[:, :, -WINDOW:], positions[-WINDOW:]
        slots = positions % WINDOW
        self.k, self.v = self.k.clone(), self.v.clone()
        self.positions = self.positions.clone()
        self.k[:, :, slots], self.v[:, :, slots] = k, v
        self.positions[slots] = positions

    def read(self):
        return self.k, self.v, self.positions


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.h, self.g, self.d = heads, kv_heads, dim // heads
        if self.d % 2:
            raise ValueError("rotary wants an even head width")
        self.wq = nn.Linear(dim, heads * self.d, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wo = nn.Linear(heads * self.d, dim, bias=False)

    def forward(self, x, positions, cache=None):
        B, T, _ = x.shape
        q = rotate(self.wq(x).view(B, T, self.h, self.d).transpose(1, 2), positions)
        k = rotate(self.wk(x).view(B, T, self.g, self.d).transpose(1, 2), positions)
        v = self.wv(x).view(B, T, self.g, self.d).transpose(1, 2)
        keys, values, key_positions = k, v, positions
        if cache is not None:
            prefill = cache.k is None
            cache.write(k, v, positions)
            if not prefill:
                keys, values, key_positions = cache.read()
        keys = keys.repeat_interleave(self.h // self.g, 1)
        values = values.repeat_interleave(self.h // self.g, 1)
        distance = positions[:, None] - key_positions[None, :]
        seen = (distance >= 0) & (distance < WINDOW)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.w1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)

    def forward(self, x, positions, cache=None):
        h = x + self.attention(self.attention_norm(x), positions, cache)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, caches=None):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if caches is None else caches[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    caches = [RollingCache() for _ in model.layers]
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, caches))
        start += chunk.shape[1]
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=Mistral,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
        "tied": False,
    },
)
