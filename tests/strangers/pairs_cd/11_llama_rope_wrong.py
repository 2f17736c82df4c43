WHAT = 'the exponents of the rotary frequencies are divided by d_model instead of by the width of a head, so frequencies fall far too slowly (line 24: inv = base ** (-torch.arange(0, K, 2, device=x.device, dtype=x.dtype) / d_model))'
"""LLaMA in sixty lines: RMSNorm, RoPE, SwiGLU, tied head."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope(x, d_model, base=10000.0):
    """x [B, H, T, K]; pairs (0, 1), (2, 3), ..."""
    T, K = x.shape[-2:]
    if K % 2:
        raise ValueError("odd head width")
    inv = base ** (-torch.arange(0, K, 2, device=x.device, dtype=x.dtype) / d_model)
    angle = torch.outer(torch.arange(T, device=x.device, dtype=x.dtype), inv)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self, d, h, d_ff):
        super().__init__()
        self.d, self.h = d, h
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        y = self.n1(x)
        q, k, v = (w(y).view(B, T, self.h, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, self.d), rope(k, self.d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d, h, d_ff) for _ in range(n))
        self.norm = RMSNorm(d)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


subject = Subject(
    kind="decoder",
    name="small LLaMA",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    declares={"causal": True, "positions": "rotary", "layout": "interleaved", "base": 10000, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "bias": False, "tied": True},
)
