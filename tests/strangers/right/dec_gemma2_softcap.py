"""Gemma 2 style decoder: soft-capped scores and logits, sandwich RMSNorm with gain (1 + w), local and global layers in turn.

Layer 0, 2, ... see a window of 4, layer 1, 3, ... see everything before; with at least two layers the whole model sees all
of the past, so no window is declared. The cap on scores is 20 (Gemma: 50); embeddings are multiplied by sqrt(d_model).
"""

import math

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4
SCORE_CAP = 20.0
LOGIT_CAP = 30.0


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        acc = x if x.dtype == torch.float64 else x.float()
        acc = acc * torch.rsqrt(acc.square().mean(dim=-1, keepdim=True) + self.eps)
        return (acc * (1.0 + self.weight.to(acc.dtype))).to(x.dtype)


def soft_cap(x, cap):
    return torch.tanh(x / cap) * cap


def apply_rope(x, theta=10000.0):  # [b, h, t, d]; the pair (i, i + d/2) is one complex number
    half = x.size(-1) // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    phase = torch.arange(x.size(-2), dtype=torch.float64, device=x.device)[:, None] * freq
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GemmaAttention(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.heads, self.kv_heads, self.width = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        self.local = local
        self.scaling = self.width**-0.5
        self.qkv_proj = nn.Linear(c.d_model, (self.heads + 2 * self.kv_heads) * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, c.d_model, bias=False)

    def forward(self, x, allowed, near):
        b, t, _ = x.shape
        qkv = self.qkv_proj(x).view(b, t, -1, self.width).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = apply_rope(q) * self.scaling, apply_rope(k)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = soft_cap(q @ k.mT, SCORE_CAP)
        if self.local:
            allowed = allowed & near
        scores = torch.where(allowed, scores, -2.3819763e38 if scores.dtype != torch.float16 else -6e4)
        probs = torch.where(allowed, F.softmax(scores, dim=-1), 0.0)
        return self.o_proj((probs @ v).transpose(1, 2).reshape(b, t, -1))


class GemmaMLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma2Layer(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.self_attn = GemmaAttention(c, local)
        self.mlp = GemmaMLP(c)
        self.input_layernorm = GemmaRMSNorm(c.d_model)
        self.post_attention_layernorm = GemmaRMSNorm(c.d_model)
        self.pre_feedforward_layernorm = GemmaRMSNorm(c.d_model)
        self.post_feedforward_layernorm = GemmaRMSNorm(c.d_model)

    def forward(self, x, allowed, near):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), allowed, near))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedder = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Gemma2Layer(c, local=i % 2 == 0) for i in range(c.num_layers)])
        self.final_norm = GemmaRMSNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        i = torch.arange(t, device=tokens.device)
        back = i[:, None] - i[None, :]
        allowed = (back >= 0)[None, None]
        near = (back < WINDOW)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.embedder(tokens) * math.sqrt(self.embedder.embedding_dim)
        for layer in self.layers:
            x = layer(x, allowed, near)
        return soft_cap(self.final_norm(x) @ self.embedder.weight.t(), LOGIT_CAP)


COMMON = dict(
    kind="decoder",
    build=Gemma2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4], "num_layers": [2, 3]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "padding_side": "both",
        "soft_cap": SCORE_CAP,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "embedding_scale": True,
        "structure": "other",
    },
)
