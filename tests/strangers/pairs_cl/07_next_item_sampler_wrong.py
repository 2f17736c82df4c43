"""A next-item model (SASRec without positions) and the sampler of its recommendations: temperature and top-k."""

import torch
from torch import nn

from veriformer.properties import Subject


class RMS(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.g


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.h = heads
        self.a, self.b = RMS(dim), RMS(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        y = self.a(x)
        q, k, v = (w(y).unflatten(-1, (self.h, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.b(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class NextItem(nn.Module):
    def __init__(self, items, dim, heads, layers, hidden):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(layers)])
        self.last = RMS(dim)

    def forward(self, tokens):
        return self.last(self.blocks(self.items(tokens))) @ self.items.weight.T


@torch.no_grad()
def recommend(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1] / temperature
        if top_k is not None:
            best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
            logits = logits.masked_fill(logits < best.min(), -torch.inf)
        p = logits.softmax(-1)
        drawn_from.append(p)
        tokens = torch.cat([tokens, torch.multinomial(p, 1)], 1)
    return tokens, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="next item",
    build=lambda c: NextItem(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    sampling=recommend,
    declares={"positions": "none", "norm": "rms", "tied": True, "bias": False, "activation": "swiglu"},
)

WHAT = 'The threshold of top-k is the least of the best scores of the whole batch, not of each row (line 55): with one row it is right, with several all rows but one keep more than k items.'
