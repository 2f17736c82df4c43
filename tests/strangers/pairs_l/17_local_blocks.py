"""Longformer-style local decoder: the sequence in blocks, each looks at itself and at the block before it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 4


def local(look_back, exists):
    class LocalAttention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

        def forward(self, x):
            b, n, d = x.shape
            pad = -n % BLOCK
            x = F.pad(x, (0, 0, 0, pad))
            blocks = (n + pad) // BLOCK
            q, k, v = (
                t.view(b, blocks, BLOCK, self.heads, -1).transpose(2, 3) for t in self.qkv(x).chunk(3, dim=-1)
            )
            k, v = (torch.cat([look_back(t), t], dim=3) for t in (k, v))
            i = torch.arange(BLOCK, device=x.device)
            j = torch.arange(2 * BLOCK, device=x.device) - BLOCK
            allowed = (j[None, :] <= i[:, None]).expand(blocks, 1, BLOCK, 2 * BLOCK)
            allowed = allowed & exists(torch.arange(blocks, device=x.device)[:, None] * BLOCK + j)[:, None, None, :]
            scores = q @ k.mT * q.shape[-1] ** -0.5
            y = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
            return self.out(y.transpose(2, 3).reshape(b, n + pad, d)[:, :n])

    class Layer(nn.Module):
        def __init__(self, dim, heads, ff):
            super().__init__()
            self.norm_a, self.norm_f = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attn = LocalAttention(dim, heads)
            self.ff = nn.Sequential(nn.Linear(dim, ff), nn.GELU(), nn.Linear(ff, dim))

        def forward(self, x):
            x = x + self.attn(self.norm_a(x))
            return x + self.ff(self.norm_f(x))

    class LocalLM(nn.Module):
        def __init__(self, vocab, dim, depth, heads, ff, max_len):
            super().__init__()
            self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
            self.layers = nn.Sequential(*[Layer(dim, heads, ff) for _ in range(depth)])
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

        def forward(self, ids):
            x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
            return self.head(self.norm(self.layers(x)))

    return LocalLM


def shift_in(t):
    return F.pad(t, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]


def roll_around(t):
    return t.roll(1, dims=1)


def subject(cls):
    return Subject(
        kind="decoder",
        name="local",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len),
        forward=lambda m, tokens: m(tokens),
        declares={"causal": True, "sparse": True},
    )


right = subject(local(shift_in, lambda key: key >= 0))
wrong = subject(local(roll_around, lambda key: key == key))
WHAT = "the block before is made by torch.roll, and nothing hides it from the first block: it looks at the last one"
CAUSE = (
    "The look-back wraps around: the first block of queries attends to the last block of the sequence (its own one, where "
    "there is one alone), so the first positions see the future."
)
