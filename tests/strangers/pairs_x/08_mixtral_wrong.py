WHAT = "The weights of the two chosen experts are not divided by their sum; the line is missing in route, before (line 74)."
"""Mixtral 8x7B (Jiang et al. 2024): of eight SwiGLU experts each token goes to two."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 8, 2


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rope(x, base=1_000_000.0):
    T, K = x.shape[-2:]
    freq = base ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.arange(T, device=x.device, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary heads have an even width")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, allowed):
        B, T, D = x.shape
        q = rope(self.wq(x).view(B, T, self.heads, -1).transpose(1, 2))
        k = rope(self.wk(x).view(B, T, self.kv_heads, -1).transpose(1, 2))
        v = self.wv(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, D))


class Expert(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(dim, ffn) for _ in range(EXPERTS)])

    def route(self, x):
        probs = self.gate(x).softmax(dim=-1)
        top, chosen = probs.topk(TOP_K, dim=-1)
        return torch.zeros_like(probs).scatter(-1, chosen, top)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = weights[:, e].nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, e, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn):
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.moe = SparseMoe(dim, ffn)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, allowed):
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.moe(self.ffn_norm(x))


class Mixtral(nn.Module):
    def __init__(self, vocab_size, dim, heads, kv_heads, layers, ffn):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([Block(dim, heads, kv_heads, ffn) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.output(self.norm(x))


subject = Subject(
    kind="decoder",
    name="Mixtral",
    build=lambda c: Mixtral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    router=lambda m, x: m.layers[0].moe.route(x),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 1000000,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "bias": False,
        "tied": False,
        "grouped_queries": True,
        "norm_topk_prob": True,
        "padding_side": "both",
    },
)
