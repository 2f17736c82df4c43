"""Causal self-attention with normalised queries and keys (LayerNorm per head, as in ViT-22B) and rotary positions."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Queries and keys are rotated first and normalised afterwards, so that the LayerNorm acts on rotated channels."
CAUSE = (
    "The per-head LayerNorm of queries and keys stands behind the rotation instead of before it. Its mean over the "
    "channels (and its gain and bias) does not commute with rotating pairs, so scores depend on where query and key "
    "stand and no longer on their distance alone."
)


def split_heads(x, heads):  # "b t (h d) -> b h t d"
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x):  # "b h t d -> b t (h d)"
    return x.transpose(1, 2).flatten(-2)


class Rope(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary positions need heads of even width")
        self.dim, self.base = dim, base

    def forward(self, x):
        half = self.dim // 2
        rate = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)[:, None] * rate
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_v, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)
        self.rope = Rope(dim // heads)

    def queries_and_keys(self, x):
        q, k = split_heads(self.to_q(x), self.heads), split_heads(self.to_k(x), self.heads)
        return self.rope(self.q_norm(q)), self.rope(self.k_norm(k))

    def forward(self, x, attention_mask=None):
        q, k = self.queries_and_keys(x)
        v = split_heads(self.to_v(x), self.heads)
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).masked_fill(~allowed, 0)
        return self.to_out(merge_heads(weights @ v))


class AttentionB(Attention):
    def queries_and_keys(self, x):
        q, k = split_heads(self.to_q(x), self.heads), split_heads(self.to_k(x), self.heads)
        return self.q_norm(self.rope(q)), self.k_norm(self.rope(k))


def make(cls):
    return Subject(
        kind="self_attention",
        name=cls.__name__,
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
        domain={"d_model": [16, 32], "num_heads": [1, 2, 4]},
        declares={"causal": True, "positions": "rotary", "layout": "halves", "query_key_norm": True, "bias": False},
    )


right = make(Attention)
wrong = make(AttentionB)
