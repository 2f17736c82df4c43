"""A Mistral-like decoder: sliding window, rotary positions, RMSNorm, SwiGLU, and a cache that keeps the window only."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = "The rolling cache keeps `window` past keys instead of window - 1, and a single decoding step sees all that is kept: one token too many."
CAUSE = (
    "The slice on the cache is [-window:] where it must be [1 - window:]: together with the new token that makes "
    "window + 1 keys, and single-token steps go without a mask, so cached decoding looks one step further back than "
    "the mask of the uncached forward (chunks of several tokens are masked and right)."
)

WINDOW = 4


def rotate(x, start):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, keep):
        super().__init__()
        self.heads, self.keep = heads, keep
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, start=0, past=None):
        q, k, v = self.wqkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        new, seen = q.shape[-2], k.shape[-2]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if past is None or new > 1:  # a single new token sees all that the cache has kept
            back = torch.arange(seen - new, seen, device=x.device)[:, None] - torch.arange(seen, device=x.device)
            scores = scores.masked_fill((back < 0) | (back >= WINDOW), float("-inf"))
        x = x + self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), (k[..., self.keep :, :], v[..., self.keep :, :])


class Mistral(nn.Module):
    def __init__(self, c, keep=1 - WINDOW):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, keep) for _ in range(c.num_layers)])
        self.norm, self.head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def step(self, tokens, start, past):
        x, kept = self.embed(tokens), []
        for layer, old in zip(self.layers, past):
            x, new = layer(x, start, old)
            kept.append(new)
        return self.head(self.norm(x)), kept

    def forward(self, tokens):
        return self.step(tokens, 0, [None] * len(self.layers))[0]


def cached(model, chunks):
    past, start, outputs = [None] * len(model.layers), 0, []
    for chunk in chunks:
        logits, past = model.step(chunk, start, past)
        start += chunk.shape[1]
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def subject(name, keep):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: Mistral(c, keep),
        forward=lambda m, tokens: m(tokens),
        cache=cached,
        domain={"d_model": [8, 16, 32], "num_heads": [1, 2, 4]},
        declares={
            "positions": "rotary",
            "layout": "halves",
            "window": WINDOW,
            "norm": "rms",
            "norm_placement": "pre",
            "activation": "swiglu",
            "bias": False,
        },
    )


right = subject("rolling cache", 1 - WINDOW)
wrong = subject("rolling cache of a window", -WINDOW)
