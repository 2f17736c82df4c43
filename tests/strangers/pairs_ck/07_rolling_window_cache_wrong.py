"""Sliding windows with ALiBi; the cache holds no more than a window (rolling buffer)."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


def alibi(n):
    if math.log2(n).is_integer():
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    near = 2 ** math.floor(math.log2(n))
    return alibi(near) + alibi(2 * near)[0::2][: n - near]


class Window(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.to_q, self.to_kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.register_buffer("slopes", torch.tensor(alibi(h), dtype=torch.float64), persistent=False)

    def forward(self, x, start=0, past=None):
        B, T, D = x.shape
        fold = lambda z: z.view(B, -1, self.h, D // self.h).transpose(1, 2)
        q = fold(self.to_q(x))
        k, v = map(fold, self.to_kv(x).chunk(2, dim=-1))
        if past is not None:
            k, v = (torch.cat(pair, 2)[:, :, -WINDOW:] for pair in zip(past, (k, v)))
        i = torch.arange(start, start + T, device=x.device)
        j = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        back = i[:, None] - j
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores - self.slopes.to(x.dtype)[:, None, None] * back.to(x.dtype)
        scores = scores.masked_fill((back < 0) | (back >= WINDOW), torch.finfo(x.dtype).min)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        return self.out(y), (k[:, :, -WINDOW:], v[:, :, -WINDOW:])


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mix = Window(c.d_model, c.num_heads)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, start, past):
        y, past = self.mix(self.a(x), start, past)
        x = x + y
        return x + self.mlp(self.b(x)), past


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def step(self, tokens, start, pasts):
        x, new = self.emb(tokens), []
        for block, past in zip(self.blocks, pasts):
            x, past = block(x, start, past)
            new.append(past)
        return self.head(self.norm(x)), new

    def forward(self, tokens):
        return self.step(tokens, 0, [None] * len(self.blocks))[0]


def decode(model, chunks):
    pasts, start, out = [None] * len(model.blocks), 0, []
    for chunk in chunks:
        y, pasts = model.step(chunk, start, pasts)
        start += chunk.shape[1]
        out.append(y)
    return torch.cat(out, dim=1)


subject = Subject(
    kind="decoder",
    build=Model,
    forward=lambda m, tokens: m(tokens),
    cache=decode,
    declares={"window": WINDOW, "positions": "alibi"},
)

WHAT = 'Line 32: behind a cache, keys are cut to the last WINDOW before they are attended to; right for one new token, but the first queries of a chunk of several miss keys that are inside their window.'
