"""A llama: RMSNorm, SwiGLU, grouped queries, rotary positions on a packed projection."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the rotation is applied to the whole packed projection, values included"
CAUSE = (
    "The values are rotated too, not only queries and keys, so that absolute positions enter the residual stream and "
    "a shift of all positions (left padding) changes the outputs."
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rotate(x, base=10000.0):
    """x [B, T, heads, K]; channel i and i + K/2 are a pair."""
    T, K = x.shape[1], x.shape[-1]
    inv_freq = base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angles = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] * inv_freq
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    cos, sin = angles.cos()[:, None].to(wide.dtype), angles.sin()[:, None].to(wide.dtype)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wqkv = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def positions(self, packed):
        turned, values = packed.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        return torch.cat((rotate(turned), values), dim=2)

    def forward(self, x, allowed):
        B, T, D = x.shape
        packed = self.positions(self.wqkv(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        q, k, v = packed.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
        group = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).masked_fill(~allowed, 0)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, D))


class PackedAttention(Attention):
    def positions(self, packed):
        return rotate(packed)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.attention = attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.feed_forward = FeedForward(c.d_model, c.d_ff)
        self.attention_norm = RMSNorm(c.d_model)
        self.ffn_norm = RMSNorm(c.d_model)

    def forward(self, x, allowed):
        h = x + self.attention(self.attention_norm(x), allowed)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(TransformerBlock(c, attention) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, allowed)
        return self.output(self.norm(h))


def subject(attention):
    return Subject(
        kind="decoder",
        name="llama",
        build=lambda c: Llama(c, attention),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": (8, 16), "num_heads": (2, 4)},
        declares={
            "causal": True,
            "positions": "rotary",
            "layout": "halves",
            "norm": "rms",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "swiglu",
            "bias": False,
            "grouped_queries": True,
            "tied": False,
            "padding_side": "both",
        },
    )


right = subject(Attention)
wrong = subject(PackedAttention)
