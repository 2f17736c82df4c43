"""Encoder with rotary positions, RMSNorm and a masked-token head that shares the embedding."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


def exists(val):
    return val is not None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype)
        y = y / torch.sqrt(y.square().mean(dim=-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.gamma


def rotary(t, base=10000):
    """Pairs of neighbouring channels are turned by position * base^(-2i/d)."""
    n, d = t.shape[-2:]
    freqs = base ** (-torch.arange(0, d, 2, device=t.device, dtype=torch.float64) / d)
    angles = einsum("n,f->nf", torch.arange(n, device=t.device, dtype=torch.float64), freqs)
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    a, b = t.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        q, k = rotary(q), rotary(k)
        sim = einsum("bhid,bhjd->bhij", q, k) * self.scale
        if exists(mask):
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.proj_in = nn.Linear(dim, inner * 2, bias=False)
        self.proj_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        x, gate = self.proj_in(x).chunk(2, dim=-1)
        return self.proj_out(F.silu(gate) * x)


class Encoder(nn.Module):
    def __init__(self, *, num_tokens, dim, depth, heads, ff_inner):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList([RMSNorm(dim), Attention(dim, heads), RMSNorm(dim), FeedForward(dim, ff_inner)])
            )
        self.norm = RMSNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens)
        self.to_logits.weight = self.token_emb.weight
        nn.init.normal_(self.token_emb.weight, std=dim**-0.5)

    def forward(self, tokens, mask=None):
        x = self.token_emb(tokens)
        for attn_norm, attn, ff_norm, ff in self.layers:
            h = attn_norm(x)
            x = x + attn(h, mask)
            h = ff_norm(x)
            x = x + ff(h)
        return self.to_logits(self.norm(x))


subject = Subject(
    kind="encoder",
    name="rotary encoder",
    build=lambda c: Encoder(num_tokens=c.vocab_size, dim=c.d_model, depth=c.num_layers, heads=c.num_heads, ff_inner=c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (8, 16), "num_heads": (1, 2, 4)},
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "embedding_scale": False,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": True,
        "tied": True,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "textbook",
    },
)
