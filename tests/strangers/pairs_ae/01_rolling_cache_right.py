"""A small decoder with sliding windows and a cache that rolls with them."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def rotate(x, start):
    """Rotary positions, halves layout; x is [B, H, T, K]."""
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    pos = torch.arange(start, start + x.shape[-2], dtype=torch.float64, device=x.device)
    angle = pos[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary positions need an even head width")
        self.heads, self.window = heads, window
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, past=None, start=0):
        B, T, D = x.shape
        q, k, v = (w(x).view(B, T, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            keep = self.window + T - 1
            k, v = k[:, :, -keep:], v[:, :, -keep:]
        i = torch.arange(start, start + T, device=x.device)[:, None]
        j = torch.arange(start + T - k.shape[2], start + T, device=x.device)[None, :]
        allowed = (j <= i) & (j > i - self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.wo(y.transpose(1, 2).reshape(B, T, D)), (k, v)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = WindowAttention(dim, heads, WINDOW)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, past=None, start=0):
        y, past = self.attn(self.norm1(x), past, start)
        x = x + y
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), past


class Mistralet(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, cache=None, start=0):
        x = self.embed(tokens)
        for n, block in enumerate(self.blocks):
            x, past = block(x, None if cache is None else cache[n], start)
            if cache is not None:
                cache[n] = past
        return self.head(self.norm(x))


def cached(model, chunks):
    cache, start, outs = [None] * len(model.blocks), 0, []
    for chunk in chunks:
        outs.append(model(chunk, cache, start))
        start += chunk.shape[1]
    return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    name="window decoder with rolling cache",
    build=lambda c: Mistralet(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
