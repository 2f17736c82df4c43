WHAT = "The sliding window sees one token too many: i - j <= WINDOW in place of i - j < WINDOW (line 51)."
"""Gemma 3 (2025), text: five layers of a sliding window to one that sees all, normed queries and keys, four norms a layer."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def rope(x, base):
    T, K = x.shape[-2:]
    freq = base ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.arange(T, device=x.device, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class GemmaAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads, is_local):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary heads have an even width")
        self.heads, self.kv_heads, self.head_dim, self.is_local = heads, kv_heads, dim // heads, is_local
        self.base = 10_000.0 if is_local else 1_000_000.0
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = GemmaRMSNorm(self.head_dim)
        self.k_norm = GemmaRMSNorm(self.head_dim)

    def allowed(self, length, device):
        i = torch.arange(length, device=device)[:, None]
        j = torch.arange(length, device=device)[None, :]
        seen = j <= i
        if self.is_local:
            seen = seen & (i - j <= WINDOW)
        return seen

    def forward(self, x, attention_mask=None):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rope(q, self.base), rope(k, self.base)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        allowed = self.allowed(T, x.device)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, -1))


class GemmaLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn, is_local):
        super().__init__()
        self.self_attn = GemmaAttention(dim, heads, kv_heads, is_local)
        self.gate_proj = nn.Linear(dim, ffn, bias=False)
        self.up_proj = nn.Linear(dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, dim, bias=False)
        self.input_layernorm = GemmaRMSNorm(dim)
        self.post_attention_layernorm = GemmaRMSNorm(dim)
        self.pre_feedforward_layernorm = GemmaRMSNorm(dim)
        self.post_feedforward_layernorm = GemmaRMSNorm(dim)

    def forward(self, x, attention_mask=None):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), attention_mask))
        h = self.pre_feedforward_layernorm(x)
        h = self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        return x + self.post_feedforward_layernorm(h)


class Gemma3(nn.Module):
    def __init__(self, vocab_size, dim, heads, kv_heads, layers, ffn):
        super().__init__()
        self.dim = dim
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            [GemmaLayer(dim, heads, kv_heads, ffn, is_local=bool((i + 1) % 6)) for i in range(layers)]
        )
        self.norm = GemmaRMSNorm(dim)

    def forward(self, tokens, attention_mask=None):
        x = self.embed_tokens(tokens) * self.dim**0.5
        for layer in self.layers:
            x = layer(x, attention_mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)


subject = Subject(
    kind="decoder",
    name="Gemma 3",
    build=lambda c: Gemma3(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"num_layers": (1, 2, 3)},  # the sixth would see all
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "query_key_norm": True,
        "bias": False,
        "tied": True,
        "embedding_scale": True,
        "grouped_queries": True,
        "padding_side": "both",
    },
)
