WHAT = "beam reordering of the key-value cache reads rows that it has already overwritten (k[beam] of the clone that is written, not of the old cache), so that [1, 0] gives both samples the cache of sample 1: line 52."
"""LLaMA in one file, with grouped heads and a cache that beam search may reorder."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def apply_rotary_emb(x, start_pos, theta=10000.0):
    """x [B, T, H, K]; neighbouring channels are a pair."""
    T, K = x.shape[1], x.shape[-1]
    freqs = theta ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angles = torch.arange(start_pos, start_pos + T, dtype=torch.float64, device=x.device)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype)[:, None, :], angles.sin().to(x.dtype)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class KVCache:
    """Keys and values of one layer, [B, S, G, K]."""

    def __init__(self):
        self.k = self.v = None

    def __len__(self):
        return 0 if self.k is None else self.k.shape[1]

    def update(self, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)
        self.k, self.v = k, v
        return k, v

    def reorder(self, beams):
        old_k, old_v = self.k, self.v
        k, v = old_k.clone(), old_v.clone()
        for row, beam in enumerate(beams):
            k[row] = k[beam]
            v[row] = v[beam]
        self.k, self.v = k, v


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary embeddings need heads of even width")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        start_pos = 0 if cache is None else len(cache)
        q = apply_rotary_emb(self.wq(x).view(B, T, self.n_heads, self.head_dim), start_pos)
        k = apply_rotary_emb(self.wk(x).view(B, T, self.n_kv_heads, self.head_dim), start_pos)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim)
        if cache is not None:
            k, v = cache.update(k, v)
        rep = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(self.head_dim)
        future = torch.ones(T, k.shape[1], dtype=torch.bool, device=x.device).triu(start_pos + 1)
        probs = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.wo(torch.einsum("bhts,bshk->bthk", probs, v).reshape(B, T, -1))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, cache=None):
        h = x + self.attention(self.attention_norm(x), cache)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Llama(nn.Module):
    def __init__(self, vocab_size, dim, n_layers, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([TransformerBlock(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, caches=None):
        h = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, None if caches is None else caches[i])
        return self.output(self.norm(h))


def cached(model, chunks, reorder=None):
    caches = [KVCache() for _ in model.layers]
    outputs = []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, caches))
        if i == 0 and reorder is not None:
            for cache in caches:
                cache.reorder([int(b) for b in reorder])
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="llama with beams",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
