WHAT = "The soft cap comes after the mask: what was masked is capped to -5 and keeps weight, so that future and padding are seen (line 51)."
"""Gemma 2 in one file (einsum style): capped scores, GQA, sandwich norms, GeGLU, scaled and tied embeddings."""

import math

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1 + self.scale)


def apply_rope(x, base=10000.0):
    """x: B N T H"""
    T, H = x.shape[-2:]
    exponent = torch.arange(0, H, 2, dtype=torch.float64, device=x.device) / H
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] / base**exponent
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x[..., : H // 2], x[..., H // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, d, n, k, cap):
        super().__init__()
        h = d // n
        if h % 2:
            raise ValueError("rotary needs an even head")
        self.h, self.g, self.cap = h, n // k, cap
        self.q_einsum = nn.Parameter(torch.randn(n, d, h) * d**-0.5)
        self.kv_einsum = nn.Parameter(torch.randn(2, k, d, h) * d**-0.5)
        self.attn_vec_einsum = nn.Parameter(torch.randn(n, h, d) * d**-0.5)

    def forward(self, x, hidden):
        q = apply_rope(einsum("btd,ndh->bnth", x, self.q_einsum))
        k, v = einsum("bsd,ckdh->cbksh", x, self.kv_einsum)
        k = apply_rope(k)
        q = q.unflatten(1, (-1, self.g))  # B K G T H
        logits = einsum("bkgth,bksh->bkgts", q, k) / math.sqrt(self.h)
        logits = logits.masked_fill(hidden, torch.finfo(x.dtype).min)
        logits = self.cap * torch.tanh(logits / self.cap)
        encoded = einsum("bkgts,bksh->bkgth", logits.softmax(-1), v).flatten(1, 2)
        return einsum("bnth,nhd->btd", encoded, self.attn_vec_einsum)


class FeedForward(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.gating = nn.Linear(d, 2 * f, bias=False)
        self.linear = nn.Linear(f, d, bias=False)

    def forward(self, x):
        gate, up = self.gating(x).chunk(2, -1)
        return self.linear(F.gelu(gate, approximate="tanh") * up)


class Block(nn.Module):
    def __init__(self, d, n, k, f, cap):
        super().__init__()
        self.pre_attention_norm, self.post_attention_norm = RMSNorm(d), RMSNorm(d)
        self.pre_ffw_norm, self.post_ffw_norm = RMSNorm(d), RMSNorm(d)
        self.attn, self.mlp = Attention(d, n, k, cap), FeedForward(d, f)

    def forward(self, x, hidden):
        x = x + self.post_attention_norm(self.attn(self.pre_attention_norm(x), hidden))
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class Gemma2(nn.Module):
    def __init__(self, vocab, d, n, k, layers, f, cap=5.0):
        super().__init__()
        self.input_embedding = nn.Parameter(torch.randn(vocab, d) * d**-0.5)
        self.layer = nn.ModuleList(Block(d, n, k, f, cap) for _ in range(layers))
        self.final_norm = RMSNorm(d)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        hidden = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)[None, None, None]
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None, None, :]
        x = F.embedding(tokens, self.input_embedding) * math.sqrt(self.input_embedding.shape[1])
        for block in self.layer:
            x = block(x, hidden)
        return einsum("btd,vd->btv", self.final_norm(x), self.input_embedding)


subject = Subject(
    kind="decoder",
    name="Gemma 2",
    build=lambda c: Gemma2(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "soft_cap": 5.0,
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "tied": True,
        "embedding_scale": True,
        "structure": "other",
        "padding_side": "both",
    },
)
