WHAT = "No mask is made for a single query (CachedAttention.forward, line 36), though the static buffer goes whole into attention: a decoding step attends to the empty slots too, whose zero keys get score 0."
"""Decoder with a cache of static shape (so that a decoding step can be captured once): the whole buffer goes into attention."""
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class StaticCache:
    k: Tensor  # [layers, B, heads, max_len, d_head]
    v: Tensor
    filled: int = 0


class CachedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cache=None, index=0):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            rows = torch.arange(cache.filled, cache.filled + T, device=x.device)
            cache.k[index] = cache.k[index].index_copy(2, rows, k)
            cache.v[index] = cache.v[index].index_copy(2, rows, v)
            slots = torch.arange(cache.k.shape[3], device=x.device)
            mask = slots[None, :] <= rows[:, None] if T > 1 else None
            y = F.scaled_dot_product_attention(q, cache.k[index], cache.v[index], attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class Transformer(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.max_len, self.heads = max_len, heads
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.attn = nn.ModuleList(CachedAttention(dim, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, dim, bias=False))
            for _ in range(layers)
        )
        self.norm_a = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.norm_m = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.unembed = nn.Linear(dim, vocab, bias=False)

    def setup_cache(self, batch):
        w = self.embed.weight
        shape = (len(self.attn), batch, self.heads, self.max_len, w.shape[1] // self.heads)
        return StaticCache(w.new_zeros(shape), w.new_zeros(shape))

    def forward(self, tokens, cache=None):
        start = cache.filled if cache else 0
        end = start + tokens.shape[1]
        if end > self.max_len:
            raise ValueError(f"{end} tokens do not fit into {self.max_len}")
        x = self.embed(tokens) + self.place.weight[start:end]
        for i, (norm_a, attn, norm_m, mlp) in enumerate(zip(self.norm_a, self.attn, self.norm_m, self.mlp)):
            x = x + attn(norm_a(x), cache, i)
            x = x + mlp(norm_m(x))
        if cache:
            cache.filled = end
        return self.unembed(self.norm(x))


@torch.no_grad()
def cached(model, chunks):
    cache = model.setup_cache(chunks[0].shape[0])
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    cache, feed = (model.setup_cache(tokens.shape[0]) if use_cache else None), tokens
    for _ in range(steps):
        best = model(feed, cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, best), dim=1)
        feed = best if use_cache else tokens
    return tokens


subject = Subject(
    kind="decoder",
    name="decoder with a static cache",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    generate=generate,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "relu", "bias": False, "tied": False, "beyond_max_len": "error",
    },
)
