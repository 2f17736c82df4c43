WHAT = "Queries and keys are [b, n, h, d], but are rotated along the default axis -2, the heads: angles follow the head's number, not the position, and cancel in q k^T, so that there are no positions (line 44: `q = self.rotary.rotate_queries_or_keys(q)`)."
"""Causal self-attention with rotary positions; heads stay behind the time, as flash-attention likes them."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, theta=10000):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary needs an even number of channels")
        freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
        self.register_buffer("freqs", freqs, persistent=False)

    def rotate_queries_or_keys(self, t, seq_dim=-2):
        pos = torch.arange(t.shape[seq_dim], device=t.device, dtype=self.freqs.dtype)
        angles = einsum("i,j->ij", pos, self.freqs)
        angles = torch.cat((angles, angles), dim=-1)
        if seq_dim == -3:
            angles = angles[:, None, :]
        return t * angles.cos().to(t.dtype) + rotate_half(t) * angles.sin().to(t.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.rotary = RotaryEmbedding(dim // heads)

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1) for t in self.to_qkv(x).chunk(3, dim=-1))
        q = self.rotary.rotate_queries_or_keys(q)
        k = self.rotary.rotate_queries_or_keys(k)
        sim = einsum("bihd,bjhd->bhij", q, k) * self.scale
        allowed = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        sim = sim.masked_fill(~allowed, torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1).masked_fill(~allowed, 0.0)
        out = einsum("bhij,bjhd->bihd", attn, v)
        return self.to_out(out.reshape(b, n, -1))


subject = Subject(
    kind="self_attention",
    name="rotary attention",
    build=lambda c: Attention(c.d_model, c.num_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "bias": False,
        "empty_row": "zeros",
        "padding_side": "both",
    },
)
