"""OLMo 2 (2024): norms behind attention and feed-forward, inside the residual branch; queries and keys are normed."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope_tables(length, dim, like, base=500000.0):
    inv_freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=like.device), inv_freq)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class OlmoAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary heads have an even width")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = RMSNorm(dim)
        self.k_norm = RMSNorm(kv_heads * self.head_dim)

    def forward(self, x, tables, allowed):
        B, T, D = x.shape
        q = self.q_norm(self.q_proj(x)).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        cos, sin = tables
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, D))


class OlmoMLP(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn, bias=False)
        self.up_proj = nn.Linear(dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OlmoLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn):
        super().__init__()
        self.self_attn = OlmoAttention(dim, heads, kv_heads)
        self.mlp = OlmoMLP(dim, ffn)
        self.post_attention_layernorm = RMSNorm(dim)
        self.post_feedforward_layernorm = RMSNorm(dim)

    def forward(self, x, tables, allowed):
        x = x + self.post_attention_layernorm(self.self_attn(x, tables, allowed))
        x = x + self.post_feedforward_layernorm(self.mlp(x))
        return x


class Olmo2(nn.Module):
    def __init__(self, vocab_size, dim, heads, kv_heads, layers, ffn):
        super().__init__()
        self.head_dim = dim // heads
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([OlmoLayer(dim, heads, kv_heads, ffn) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.embed_tokens(tokens)
        tables = rope_tables(T, self.head_dim, x)
        for layer in self.layers:
            x = layer(x, tables, allowed)
        return self.lm_head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="OLMo 2",
    build=lambda c: Olmo2(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 500000,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "query_key_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "grouped_queries": True,
        "padding_side": "both",
    },
)
