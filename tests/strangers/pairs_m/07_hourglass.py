"""zoo/PR 170: Hourglass (Nawrot et al. 2021). Vanilla layers, then layers on the sequence shortened by 3, which are
brought back to full length and added, then vanilla layers again."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = "Before it is shortened by k = 3 the sequence is moved right by one step, where k - 1 are needed."
CAUSE = (
    "The shift before pooling is 1, enough only for k = 2: a group of three is pooled from one token ahead of the first "
    "position that it is upsampled to, so the shortened branch hands the next token to positions that must not see it."
)
SHORTEN = 3


class Vanilla(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).chunk(3, dim=-1)
        q, k, v = (y.reshape(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.relu(self.up(self.n2(x))))


class Shorten(nn.Module):
    """Linear pooling of k neighbours after a shift that keeps the groups causal."""

    def __init__(self, dim, k, shift):
        super().__init__()
        self.k, self.shift = k, shift
        self.pool = nn.Linear(k * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        groups = -(-t // self.k)
        x = F.pad(x, (0, 0, self.shift, self.k))[:, : groups * self.k]
        return self.pool(x.reshape(b, groups, self.k * d))


class Hourglass(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, depth, max_len, shift=SHORTEN - 1):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.where = nn.Embedding(max_len, dim)
        self.before = Vanilla(dim, heads, hidden)
        self.shorten = Shorten(dim, SHORTEN, shift)
        self.middle = nn.ModuleList([Vanilla(dim, heads, hidden) for _ in range(depth)])
        self.lengthen = nn.Linear(dim, dim)
        self.after = Vanilla(dim, heads, hidden)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        t = ids.size(1)
        x = self.before(self.embed(ids) + self.where.weight[:t])
        short = self.shorten(x)
        for layer in self.middle:
            short = layer(short)
        x = x + self.lengthen(short.repeat_interleave(SHORTEN, dim=1)[:, :t])
        return self.head(self.norm(self.after(x)))


def subject(name, **more):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: Hourglass(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, **more),
        forward=lambda m, tokens: m(tokens),
        declares={"structure": "other"},
    )


right = subject("Hourglass")
wrong = subject("Hourglass, shifted by one", shift=1)
