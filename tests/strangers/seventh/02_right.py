"""A LLaMA with grouped queries and a growing key-value cache that takes prompts in chunks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_tables(start: int, length: int, dim: int, like: Tensor, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    t = torch.arange(start, start + length, dtype=torch.float64, device=like.device)
    angles = torch.cat([torch.outer(t, inv_freq)] * 2, dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class KVCache:
    def __init__(self, n_layers: int):
        self.k: list[Tensor | None] = [None] * n_layers
        self.v: list[Tensor | None] = [None] * n_layers

    @property
    def length(self) -> int:
        return 0 if self.k[0] is None else self.k[0].shape[2]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k[layer] is not None:
            k = torch.cat([self.k[layer], k], dim=2)
            v = torch.cat([self.v[layer], v], dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def reorder(self, index: Tensor) -> None:
        self.k = [k.index_select(0, index) for k in self.k]
        self.v = [v.index_select(0, index) for v in self.v]


class Attention(nn.Module):
    def __init__(self, layer: int, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.layer, self.n_heads, self.n_kv_heads, self.head_dim = layer, n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope, pad: Tensor | None, cache: KVCache | None) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        cos, sin = rope
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        S = k.shape[2]
        mask = None
        if T > 1:  # a single token sees all that is in the cache
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(diagonal=S - T)
        if pad is not None:
            pad = pad[:, None, None, :S]
            mask = pad.expand(B, 1, T, S) if mask is None else mask & pad
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, layer: int, dim: int, n_heads: int, n_kv_heads: int, hidden: int):
        super().__init__()
        self.attention = Attention(layer, dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm = RMSNorm(dim)
        self.ffn_norm = RMSNorm(dim)

    def forward(self, x, rope, pad, cache):
        h = x + self.attention(self.attention_norm(x), rope, pad, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, vocab_size, dim, n_layers, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.n_layers, self.head_dim = n_layers, dim // n_heads
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(i, dim, n_heads, n_kv_heads, hidden) for i in range(n_layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        h = self.tok_embeddings(tokens)
        start = 0 if cache is None else cache.length
        rope = rope_tables(start, tokens.shape[1], self.head_dim, h)
        for layer in self.layers:
            h = layer(h, rope, attention_mask, cache)
        return self.output(self.norm(h))

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int, use_cache: bool = True) -> Tensor:
        cache = KVCache(self.n_layers) if use_cache else None
        fresh = tokens
        for _ in range(steps):
            logits = self(fresh if use_cache else tokens, cache=cache)
            fresh = logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, fresh], dim=1)
        return tokens


def in_chunks(model: Llama, chunks, attention_mask=None, reorder=None) -> Tensor:
    cache, outputs, seen = KVCache(model.n_layers), [], 0
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, attention_mask, cache))
        seen += chunk.shape[1]
        if i == 0 and reorder is not None:
            cache.reorder(reorder)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask[reorder, :seen], attention_mask[:, seen:]], dim=1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="llama",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=in_chunks,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    domain={"d_model": (8, 16), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "embedding_scale": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "both",
        "cached_chunks": True,
        "structure": "textbook",
    },
)
