WHAT = "The cache reports the number of stored chunks, not of tokens, as its length, so that rotary positions after a first chunk of several tokens start too early (line 41)"
"""Llama from scratch: RMSNorm, rotary embeddings, grouped queries, SwiGLU, and a cache that keeps a list of chunks."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope(x, positions, base=10000.0):
    d = x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d)
    angle = positions.to(x.dtype)[:, None] * freq
    angle = torch.cat((angle, angle), dim=-1)
    return x * angle.cos() + rotate_half(x) * angle.sin()


class KVCache:
    """Chunks of keys and values of one layer."""

    def __init__(self):
        self.keys, self.values = [], []

    @property
    def length(self):
        return len(self.keys)

    def append(self, k, v):
        self.keys.append(k)
        self.values.append(v)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.h, self.g, self.hd = heads, kv_heads, dim // heads
        if self.hd % 2:
            raise ValueError("rotary embeddings need heads of even width")
        self.wq = nn.Linear(dim, heads * self.hd, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(heads * self.hd, dim, bias=False)

    def forward(self, x, cache=None):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, t, self.g, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, t, self.g, self.hd).transpose(1, 2)
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + t, device=x.device)
        q, k = rope(q, positions), rope(k, positions)
        if cache is not None:
            k, v = cache.append(k, v)
        k = k.repeat_interleave(self.h // self.g, dim=1)
        v = v.repeat_interleave(self.h // self.g, dim=1)
        s = k.shape[2]
        mask = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, cache=None):
        x = x + self.attention(self.attention_norm(x), cache)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            [Layer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, caches=None):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[i])
        return self.output(self.norm(x))


def decode_in_chunks(model, chunks):
    caches = [KVCache() for _ in model.layers]
    return [model(chunk, caches) for chunk in chunks]


subject = Subject(
    kind="decoder",
    name="llama",
    build=Llama,
    forward=lambda m, tokens: m(tokens),
    cache=decode_in_chunks,
    declares={"positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "swiglu", "bias": False, "grouped_queries": True},
)
