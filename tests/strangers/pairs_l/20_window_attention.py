"""Causal sliding-window self-attention (window: the token itself and those before it)."""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


def windowed(inside):
    class SlidingWindowAttention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads, self.dim_head = heads, dim // heads
            self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

        def forward(self, x, mask=None):
            n = x.shape[1]
            q, k, v = (f(x).unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
            sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.dim_head**-0.5
            i = torch.arange(n, device=x.device)
            back = i[:, None] - i[None, :]
            band = (back >= 0) & inside(back)
            if mask is not None:
                band = band & (mask[:, None, None, :] | (back == 0))
            attn = sim.masked_fill(~band, float("-inf")).softmax(dim=-1)
            return self.to_out(torch.einsum("b h i j, b h j d -> b i h d", attn, v).flatten(2))

    return SlidingWindowAttention


def subject(cls):
    return Subject(
        kind="self_attention",
        name="sliding window",
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
    )


right = subject(windowed(lambda back: back < WINDOW))
wrong = subject(windowed(lambda back: back <= WINDOW))
WHAT = "the band is back <= window instead of back < window: each token sees one more than the window"
CAUSE = "The window is one too wide: output t sees t - 3 .. t, four inputs, where window=3 allows t - 2 .. t."
