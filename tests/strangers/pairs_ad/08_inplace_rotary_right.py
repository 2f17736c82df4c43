"""Llama's attention with grouped keys, its rotary embedding written in place to spare two temporaries of q's size."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def rotary_(x, cos, sin):
    """Rotate the pairs (0, 1), (2, 3), ... of x [B, H, T, D], in place."""
    even, odd = x[..., 0::2], x[..., 1::2]
    before = even.clone()
    even.mul_(cos).sub_(odd * sin)
    odd.mul_(cos).add_(before * sin)
    return x


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, theta=10000.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        if self.head_dim % 2:
            raise ValueError("rotary embeddings need an even head_dim")
        self.theta = theta
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, attention_mask=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)

        freqs = self.theta ** (-torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float64) / self.head_dim)
        angles = torch.outer(torch.arange(T, device=x.device, dtype=torch.float64), freqs)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = rotary_(q, cos, sin), rotary_(k, cos, sin)

        n_rep = self.n_heads // self.n_kv_heads
        k = k[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, torch.finfo(x.dtype).min)
        out = F.softmax(q @ k.transpose(2, 3) * self.head_dim**-0.5 + bias, dim=-1) @ v
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))


subject = Subject(
    kind="self_attention",
    name="llama attention, in place",
    build=lambda c: Attention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "grouped_queries": True,
        "bias": False,
    },
)
