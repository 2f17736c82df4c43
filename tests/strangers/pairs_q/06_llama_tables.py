"""A LLaMA-like decoder: RMSNorm, SwiGLU, grouped heads, rotary positions with tables made ahead."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The rotary tables repeat each frequency for neighbouring channels while the rotation pairs channel i with i + d/2."
CAUSE = (
    "cos and sin are laid out interleaved (repeat_interleave) but rotate_half pairs the two halves, so the two channels of a pair turn "
    "by different angles: no rotation any more, and scores do not depend on the distance alone. Heads of two channels do not show it."
)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Rope(nn.Module):
    def __init__(self, dim: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError("rotary positions need an even number of channels a head")
        rates = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = self.spread(torch.arange(length, dtype=torch.float64)[:, None] * rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def spread(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, angles), dim=-1)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, T, K]
        cos, sin = (t[: x.shape[-2]].to(x.dtype) for t in (self.cos, self.sin))
        return x * cos + rotate_half(x) * sin


class PairedRope(Rope):
    def spread(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, dim=-1)


class Attention(nn.Module):
    def __init__(self, c, rope: type[Rope]) -> None:
        super().__init__()
        self.kv, self.rep, d = c.num_key_value_heads, c.num_heads // c.num_key_value_heads, c.d_model // c.num_heads
        self.wq, self.wo = nn.Linear(c.d_model, c.d_model, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
        self.wk = nn.Linear(c.d_model, self.kv * d, bias=False)
        self.wv = nn.Linear(c.d_model, self.kv * d, bias=False)
        self.rope = rope(d, c.max_len)

    def forward(self, x: Tensor) -> Tensor:
        split = lambda y, h: y.unflatten(-1, (h, -1)).transpose(1, 2)
        q, k = self.rope(split(self.wq(x), self.kv * self.rep)), self.rope(split(self.wk(x), self.kv))
        k, v = (t.repeat_interleave(self.rep, dim=1) for t in (k, split(self.wv(x), self.kv)))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c, rope: type[Rope]) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attention = Attention(c, rope)
        self.w1, self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, c, rope: type[Rope]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c, rope) for _ in range(c.num_layers))
        self.norm, self.output = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


FACTS = {"positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "activation": "swiglu", "bias": False}
right = Subject(kind="decoder", name="llama", build=lambda c: Llama(c, Rope), forward=lambda m, t: m(t), declares=FACTS)
wrong = Subject(kind="decoder", name="llama", build=lambda c: Llama(c, PairedRope), forward=lambda m, t: m(t), declares=FACTS)
