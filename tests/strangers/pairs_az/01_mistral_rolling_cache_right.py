"""A Mistral-like decoder: rotary, grouped queries, sliding window, a rolling key-value cache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RollingCache:
    """Keys and values of the last `window` tokens of one layer."""

    def __init__(self, window):
        self.window = window
        self.keys = self.values = None

    def update(self, k, v):
        if self.keys is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        self.keys = k[:, :, -self.window :]
        self.values = v[:, :, -self.window :]
        return k, v


def rotate(x, positions):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(torch.float64)[:, None] * inv
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("rotary needs an even head")
        self.heads, self.kv_heads, self.d_head = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.d_head, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.d_head, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.d_head, bias=False)
        self.wo = nn.Linear(heads * self.d_head, dim, bias=False)

    def forward(self, x, start, cache=None):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.heads, self.d_head).transpose(1, 2)
        k = self.wk(x).view(b, t, self.kv_heads, self.d_head).transpose(1, 2)
        v = self.wv(x).view(b, t, self.kv_heads, self.d_head).transpose(1, 2)
        positions = torch.arange(start, start + t, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.update(k, v)
        at = torch.arange(start + t - k.shape[2], start + t, device=x.device)
        back = positions[:, None] - at[None, :]
        visible = (back >= 0) & (back < WINDOW)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, start, cache=None):
        x = x + self.attention(self.attention_norm(x), start, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, vocab, dim, heads, kv_heads, layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, start=0, caches=None):
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, start, None if caches is None else caches[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    caches = [RollingCache(WINDOW) for _ in model.layers]
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, caches))
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="rolling mistral",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)
