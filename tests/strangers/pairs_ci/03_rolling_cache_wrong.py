"""A Mistral-like decoder whose cache keeps the last W - 1 keys alone."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x, positions):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angle = positions.to(wide)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Past:
    """What a layer remembers: the last keys and values, and how many tokens went by."""

    def __init__(self):
        self.k = self.v = None
        self.seen = 0

    def extend(self, k, v):
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        kept = WINDOW - 1
        self.k, self.v = k[:, :, -kept:], v[:, :, -kept:]
        return k, v


class Attention(nn.Module):
    def __init__(self, d, heads, kv_heads):
        super().__init__()
        if (d // heads) % 2:
            raise ValueError("heads must be of even width")
        self.h, self.g, self.w = heads, kv_heads, d // heads
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, kv_heads * self.w, bias=False)
        self.v = nn.Linear(d, kv_heads * self.w, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x, past):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.h, self.w).transpose(1, 2)
        k = self.k(x).view(B, T, self.g, self.w).transpose(1, 2)
        v = self.v(x).view(B, T, self.g, self.w).transpose(1, 2)
        start = 0 if past.k is None else past.k.shape[2]
        here = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, here), rotate(k, here)
        k, v = past.extend(k, v)
        past.seen = start + T
        there = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        back = here[:, None] - there
        k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.w**-0.5
        scores = scores.masked_fill((back < 0) | (back >= WINDOW), -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, past):
        x = x + self.attention(self.n1(x), past)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Rolling(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, pasts=None):
        pasts = pasts or [Past() for _ in self.blocks]
        x = self.embed(tokens)
        for block, past in zip(self.blocks, pasts):
            x = block(x, past)
        return self.head(self.norm(x))

    def cached(self, chunks):
        pasts = [Past() for _ in self.blocks]
        return [self(chunk, pasts) for chunk in chunks]


subject = Subject(
    kind="decoder",
    name="rolling",
    build=Rolling,
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.cached(chunks),
    declares={
        "positions": "rotary",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)

WHAT = (
    'In cached decoding the position of the next token is taken from the length of the cache, which is trimmed to WINDOW - 1: once the window rolls, queries and keys are rotated by positions that no longer advance'
    ' (line 62).'
)
