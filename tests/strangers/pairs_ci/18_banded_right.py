"""Causal sliding-window attention in blocks: each block of queries looks at its own block of keys and the one before."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

W = 4


class Banded(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        n = -(-T // W)
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        tail = n * W - T
        q = F.pad(q, (0, 0, 0, tail)).unflatten(2, (n, W))
        # one block of zeros in front, so that the first block has one before it
        k, v = (F.pad(t, (0, 0, W, tail)).unfold(2, 2 * W, W).transpose(-1, -2) for t in (k, v))
        query = torch.arange(n * W, device=x.device).view(n, W, 1)
        key = torch.arange(-W, n * W, device=x.device).unfold(0, 2 * W, W)[:, None]
        back = query - key
        seen = (back >= 0) & (back < W) & (key >= 0)
        if attention_mask is not None:
            real = F.pad(attention_mask.bool(), (W, tail), value=False).unfold(1, 2 * W, W)
            seen = seen & real[:, None, :, None]
        scores = (q @ k.transpose(-1, -2)) * (D // self.heads) ** -0.5
        empty = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(~(seen | empty), -torch.inf).softmax(-1).masked_fill(empty, 0.0)
        y = (weights @ v).flatten(2, 3)[:, :, :T]
        return self.out(y.transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="banded",
    build=lambda c: Banded(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": W, "positions": "none", "bias": False},
)
