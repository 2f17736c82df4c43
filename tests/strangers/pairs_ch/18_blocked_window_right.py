"""Sliding-window attention in blocks, as long-document models have it: each block of queries sees its block and the one before."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def with_previous(x):
    """[B, N, W, ...] -> [B, N, 2 W, ...]: every block behind its predecessor."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return torch.cat([before, x], 2)


class BlockedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        i, j = torch.arange(WINDOW)[:, None] + WINDOW, torch.arange(2 * WINDOW)[None, :]
        self.register_buffer("band", (i >= j) & (i - j < WINDOW), persistent=False)

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        alive = x.new_ones(b, t, dtype=torch.bool) if attention_mask is None else attention_mask
        more = -t % WINDOW
        blocks = (t + more) // WINDOW

        def cut(z):
            return F.pad(z, (0, 0, 0, more)).view(b, blocks, WINDOW, self.heads, -1)

        q = cut(self.query(x)) * (d // self.heads) ** -0.5
        k, v = with_previous(cut(self.key(x))), with_previous(cut(self.value(x)))
        alive = with_previous(F.pad(alive, (0, more)).view(b, blocks, WINDOW))
        seen = self.band & alive[:, :, None, :]
        scores = torch.einsum("bnihk,bnjhk->bnhij", q, k)
        weights = scores.masked_fill(~seen[:, :, None], torch.finfo(x.dtype).min).softmax(-1)
        y = torch.einsum("bnhij,bnjhk->bnihk", weights, v)
        return self.out(y.reshape(b, t + more, d)[:, :t])


subject = Subject(
    kind="self_attention",
    name="window in blocks",
    build=lambda c: BlockedAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": WINDOW, "positions": "none"},
)
