"""Sliding-window attention by blocks: a block of queries meets its own keys and those of the block before."""

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window=WINDOW):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        length, w = x.shape[1], self.window
        x = F.pad(x, (0, 0, 0, -length % w))
        q, k, v = (rearrange(y, "b t (h d) -> b h t d", h=self.heads) for y in self.to_qkv(x).chunk(3, dim=-1))
        q = rearrange(q, "b h (n w) d -> b h n w d", w=w)
        k, v = (F.pad(y, (0, 0, w, 0)).unfold(2, 2 * w, w).transpose(-1, -2) for y in (k, v))

        dots = torch.einsum("bhnid,bhnjd->bhnij", q, k) * q.shape[-1] ** -0.5
        block = torch.arange(q.shape[2], device=x.device)[:, None, None] * w
        at = block + torch.arange(w, device=x.device)[:, None]
        key = block + torch.arange(-w, w, device=x.device)
        seen = (key <= at) & (key > at - w) & (key >= 0)
        attn = dots.masked_fill(~seen, float("-inf")).softmax(dim=-1)

        out = torch.einsum("bhnij,bhnjd->bhnid", attn, v)
        return self.to_out(rearrange(out, "b h n w d -> b (n w) (h d)"))[:, :length]


subject = Subject(
    kind="self_attention",
    name="local attention",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda model, x: model(x),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
)
