"""LLaMA-like decoder: RMSNorm, rotary positions, grouped queries, SwiGLU, a key-value cache object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


@dataclass
class ModelArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    hidden_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class KVCache:
    """Keys and values of every layer, grown as tokens come."""

    def __init__(self, n_layers: int):
        self.k: list[Optional[Tensor]] = [None] * n_layers
        self.v: list[Optional[Tensor]] = [None] * n_layers

    @property
    def length(self) -> int:
        return 0 if self.k[-1] is None else self.k[-1].shape[2]

    def update(self, layer: int, k: Tensor, v: Tensor):
        if self.k[layer] is not None:
            k = torch.cat([self.k[layer], k], dim=2)
            v = torch.cat([self.v[layer], v], dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype):
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.to(torch.float64)[:, None] * inv_freq[None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Optional[KVCache]) -> Tensor:
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        groups = self.n_heads // self.n_kv_heads
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        total = k.shape[2]
        if seqlen == 1:
            out = F.scaled_dot_product_attention(q, k, v)
        elif total == seqlen:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(seqlen, total, dtype=torch.bool, device=x.device).tril(total - seqlen)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention = Attention(args, layer)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Optional[KVCache]) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args, i) for i in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, cache: Optional[KVCache] = None) -> Tensor:
        start = 0 if cache is None else cache.length
        h = self.tok_embeddings(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        cos, sin = rotary_tables(positions, self.args.dim // self.args.n_heads, self.args.rope_theta, h.dtype)
        for layer in self.layers:
            h = layer(h, cos, sin, cache)
        return self.output(self.norm(h))

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int, use_cache: bool) -> Tensor:
        cache = KVCache(self.args.n_layers) if use_cache else None
        fresh = tokens
        for _ in range(steps):
            logits = self(fresh if use_cache else tokens, cache)
            fresh = logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, fresh], dim=1)
        return tokens


def run_chunks(model, chunks):
    cache = KVCache(model.args.n_layers)
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="llama",
    build=lambda c: Transformer(
        ModelArgs(c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.vocab_size, c.d_ff)
    ),
    forward=lambda m, tokens: m(tokens),
    cache=run_chunks,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000.0,
        "beyond_max_len": "works",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "attention_scale": "1/sqrt(d_head)",
        "init": "default",
        "embedding_scale": False,
        "shared_layers": False,
        "cached_chunks": True,
    },
)
