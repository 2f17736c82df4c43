"""A feed-forward layer made of memory: product keys choose a few of n * n value rows for every token."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ProductKeys(nn.Module):
    """Queries of two halves; the k best of the sums of both halves' scores are the k best of all n * n keys."""

    def __init__(self, width, heads, n, k):
        super().__init__()
        self.heads, self.n, self.k, self.half = heads, n, k, width // 2
        self.query = nn.Linear(width, heads * 2 * self.half)
        self.keys = nn.Parameter(torch.randn(2, heads, n, self.half) * self.half**-0.5)

    def search(self, x):
        """Scores and slots [..., heads, k]."""
        q = self.query(x).unflatten(-1, (self.heads, 2, self.half))
        first = torch.einsum("...hd,hnd->...hn", q[..., 0, :], self.keys[0])
        second = torch.einsum("...hd,hnd->...hn", q[..., 1, :], self.keys[1])
        first, rows = first.topk(self.k, dim=-1)
        second, columns = second.topk(self.k, dim=-1)
        sums = (first[..., :, None] + second[..., None, :]).flatten(-2)
        slots = (rows[..., :, None] * self.n + columns[..., None, :]).flatten(-2)
        best, which = sums.topk(self.k, dim=-1)
        return best, slots.gather(-1, which)

    def forward(self, x):
        best, slots = self.search(x)
        return best.softmax(dim=-1), slots


class MemoryLayer(nn.Module):
    """y = W_out (silu(W_gate x) * memory(x)): every head reads its own mixture of the same table."""

    def __init__(self, width, heads=2, n=8, k=3):
        super().__init__()
        self.address = ProductKeys(width, heads, n, k)
        self.values = nn.Embedding(n * n, width)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        weights, slots = self.address(x)
        read = (weights[..., None] * self.values(slots)).sum(dim=(-2, -3))
        return self.out(F.silu(self.gate(x)) * read)


subject = Subject(
    kind="feed_forward",
    name="product-key memory",
    build=lambda c: MemoryLayer(c.d_model),
    forward=lambda model, x: model(x),
    declares={"activation": "other", "structure": "other"},
)
