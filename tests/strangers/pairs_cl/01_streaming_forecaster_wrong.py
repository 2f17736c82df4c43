"""A decoder for quantised time series: sliding window of four steps, rotary positions, a rolling cache for streams."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def rope(x, positions):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(torch.float64)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class WindowAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if dim % heads or (dim // heads) % 2:
            raise ValueError("rotary heads are even")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, start, past):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        here = torch.arange(start, start + T, device=x.device)
        q, k = rope(q, here), rope(k, here)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            keep = WINDOW  # what lies further back is out of reach
            k, v = k[:, :, -keep:], v[:, :, -keep:]
        there = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        lag = here[:, None] - there[None, :]
        seen = (lag >= 0) & (lag < WINDOW)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        y = (weights @ v).transpose(1, 2).reshape(B, T, D)
        return self.out(y), (k, v)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, start, past):
        y, past = self.attention(self.norm1(x), start, past)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x)))), past


class Forecaster(nn.Module):
    def __init__(self, bins, dim, heads, layers, hidden):
        super().__init__()
        self.bins = nn.Embedding(bins, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, bins)

    def forward(self, tokens, start=0, past=None):
        past = past or [None] * len(self.blocks)
        x, present = self.bins(tokens), []
        for block, old in zip(self.blocks, past):
            x, new = block(x, start, old)
            present.append(new)
        return self.head(self.norm(x)), present


def stream(model, chunks):
    start, past, outputs = 0, None, []
    for chunk in chunks:
        y, past = model(chunk, start, past)
        start += chunk.shape[1]
        outputs.append(y)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="forecaster",
    build=lambda c: Forecaster(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens)[0],
    cache=stream,
    declares={"positions": "rotary", "layout": "halves", "window": WINDOW, "norm_placement": "pre", "activation": "gelu"},
)

WHAT = 'The rolling cache is cut to WINDOW keys before the chunk attends, not to WINDOW - 1 + T (line 37): one token at a time is right, but in a chunk of several tokens behind others the first queries lose keys of their window.'
