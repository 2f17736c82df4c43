WHAT = 'off by one in the rolling cache: it keeps WINDOW keys instead of WINDOW - 1, so a single cached step (which is not masked) sees WINDOW + 1 keys with itself (line 26: self.k[layer], self.v[layer] = xk[:, -WINDOW:], xv[:, -WINDOW:])'
"""Mistral as its authors write it (wq, wk, wv, wo; pairs side by side), with a rolling key-value cache."""
from typing import Optional

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RollingCache:
    """What a layer still has to see of the past, and how many tokens have gone by."""

    def __init__(self, n_layers: int):
        self.k: list[Optional[torch.Tensor]] = [None] * n_layers
        self.v: list[Optional[torch.Tensor]] = [None] * n_layers
        self.seen = 0

    def extend(self, layer: int, xk: torch.Tensor, xv: torch.Tensor):
        if self.k[layer] is not None:
            xk = torch.cat([self.k[layer], xk], dim=1)
            xv = torch.cat([self.v[layer], xv], dim=1)
        # the next token sees itself, too
        self.k[layer], self.v[layer] = xk[:, -WINDOW:], xv[:, -WINDOW:]
        return xk, xv


def apply_rope(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    dim = x.shape[-1]
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angles = torch.outer(positions.double(), freqs)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        if self.head_dim % 2:
            raise ValueError(f"rope wants pairs, head_dim is {self.head_dim}")
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, positions, layer, padding=None, cache: Optional[RollingCache] = None):
        bsz, seqlen, _ = x.shape
        xq = apply_rope(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim), positions)
        xk = apply_rope(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim), positions)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        if cache is not None:
            xk, xv = cache.extend(layer, xk, xv)
        keys = positions[-1] + 1 - xk.shape[1] + torch.arange(xk.shape[1], device=x.device)
        repeats = self.n_heads // self.n_kv_heads
        xk, xv = xk.repeat_interleave(repeats, dim=2), xv.repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", xq, xk) * self.head_dim**-0.5
        if cache is None or seqlen > 1:  # a single new token sees all that the cache has kept
            ahead = positions[:, None] - keys[None, :]
            allowed = (ahead >= 0) & (ahead < WINDOW)
            if padding is not None:
                allowed = allowed & padding[:, None, None, :]
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), xv).reshape(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.feed_forward = FeedForward(c.d_model, c.d_ff)
        self.attention_norm = RMSNorm(c.d_model)
        self.ffn_norm = RMSNorm(c.d_model)

    def forward(self, x, *args):
        h = x + self.attention(self.attention_norm(x), *args)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([TransformerBlock(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, padding=None, cache: Optional[RollingCache] = None):
        start = 0 if cache is None else cache.seen
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        h = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, positions, i, padding, cache)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.output(self.norm(h))


def decode(model, chunks):
    cache = RollingCache(len(model.layers))
    return torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=Transformer,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=decode,
    declares={
        "window": WINDOW, "positions": "rotary", "layout": "interleaved", "norm": "rms", "norm_placement": "pre",
        "final_norm": True, "activation": "swiglu", "bias": False, "grouped_queries": True, "padding_side": "right",
    },
)
