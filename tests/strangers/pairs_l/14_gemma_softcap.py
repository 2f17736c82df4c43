"""Gemma-2-like decoder: capped scores, rotary, (1 + w) RMS norms, GeGLU, scaled embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CAP = 5.0


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def apply_rotary_emb(x):
    half = x.shape[-1] // 2
    pos = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    freqs = torch.outer(pos, 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half))
    cos, sin = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def gemma(cap_and_hide):
    class GemmaAttention(nn.Module):
        def __init__(self, dim, n_heads, n_kv_heads):
            super().__init__()
            self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
            self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
            self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
            self.o_proj = nn.Linear(dim, dim, bias=False)

        def forward(self, x):
            B, T, _ = x.shape
            q = self.q_proj(x).view(B, T, self.n_heads, -1).transpose(1, 2)
            k = self.k_proj(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2)
            v = self.v_proj(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2)
            q, k = apply_rotary_emb(q), apply_rotary_emb(k)
            k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
            v = v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
            scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
            mask = torch.full((T, T), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
            y = torch.softmax(cap_and_hide(scores, mask), dim=-1) @ v
            return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))

    class GemmaLayer(nn.Module):
        def __init__(self, dim, n_heads, n_kv_heads, hidden):
            super().__init__()
            self.input_layernorm, self.pre_ff_layernorm = GemmaRMSNorm(dim), GemmaRMSNorm(dim)
            self.self_attn = GemmaAttention(dim, n_heads, n_kv_heads)
            self.gate_proj = nn.Linear(dim, hidden, bias=False)
            self.up_proj = nn.Linear(dim, hidden, bias=False)
            self.down_proj = nn.Linear(hidden, dim, bias=False)

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            y = self.pre_ff_layernorm(x)
            return x + self.down_proj(F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y))

    class Gemma(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.dim = c.d_model
            self.embedder = nn.Embedding(c.vocab_size, c.d_model)
            self.layers = nn.ModuleList(
                GemmaLayer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
            )
            self.norm = GemmaRMSNorm(c.d_model)

        def forward(self, tokens):
            x = self.embedder(tokens) * self.dim**0.5
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.embedder.weight.T

    return Gemma


def cap_first(scores, mask):
    return torch.tanh(scores / CAP) * CAP + mask


def mask_first(scores, mask):
    return torch.tanh((scores + mask) / CAP) * CAP


def subject(cls):
    return Subject(
        kind="decoder",
        name="gemma",
        build=cls,
        forward=lambda m, tokens: m(tokens),
        domain={"d_model": [8, 16], "num_heads": [2, 4], "num_key_value_heads": [1, 2]},
        declares={
            "causal": True,
            "soft_cap": CAP,
            "grouped_queries": True,
            "positions": "rotary",
            "layout": "halves",
            "norm": "rms",
            "norm_placement": "pre",
            "embedding_scale": True,
            "bias": False,
            "tied": True,
            "activation": "other",
        },
    )


right = subject(gemma(cap_first))
wrong = subject(gemma(mask_first))
WHAT = "the soft cap is applied after the mask: tanh turns -inf into -cap, and hidden keys keep a weight"
CAUSE = (
    "The soft cap comes after the causal mask, so a masked score is -cap instead of -inf: every query gives future keys a "
    "small but real weight."
)
