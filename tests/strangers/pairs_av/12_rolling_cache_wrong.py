WHAT = "behind a prefill the cache is trimmed to one window before the chunk attends: with chunks of several tokens the earlier queries lose the oldest keys of their windows (line 43)"
"""A small Mistral: rotary, grouped heads, sliding window, and a cache that holds one window of keys and no more."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope(x, positions):
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[:, None].double() * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RollingCache:
    """Keys and values of the last `window` positions of one layer."""

    def __init__(self, window):
        self.window, self.k, self.v, self.start = window, None, None, 0

    def update(self, k, v):
        prefill = self.k is None
        if not prefill:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        start, drop = self.start, max(k.size(2) - self.window, 0)
        self.k, self.v, self.start = k[:, :, drop:], v[:, :, drop:], start + drop
        return (k, v, start) if prefill else (self.k, self.v, self.start)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.hd = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.hd, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(heads * self.hd, dim, bias=False)

    def forward(self, x, positions, cache=None):
        b, t, _ = x.shape
        q = rope(self.wq(x).view(b, t, self.heads, self.hd).transpose(1, 2), positions)
        k = rope(self.wk(x).view(b, t, self.kv_heads, self.hd).transpose(1, 2), positions)
        v = self.wv(x).view(b, t, self.kv_heads, self.hd).transpose(1, 2)
        start = 0
        if cache is not None:
            k, v, start = cache.update(k, v)
        back = positions[:, None] - torch.arange(start, start + k.size(2), device=x.device)
        allowed = (back >= 0) & (back < WINDOW)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, ff):
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.w1, self.w3 = nn.Linear(dim, ff, bias=False), nn.Linear(dim, ff, bias=False)
        self.w2 = nn.Linear(ff, dim, bias=False)

    def forward(self, x, positions, cache=None):
        x = x + self.attention(self.attention_norm(x), positions, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, vocab, dim, heads, kv_heads, layers, ff):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("heads of an even width")
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, heads, kv_heads, ff) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, caches=None, seen=0):
        x = self.tok_embeddings(tokens)
        positions = torch.arange(seen, seen + tokens.size(1), device=tokens.device)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if caches is None else caches[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    caches, seen, outputs = [RollingCache(WINDOW) for _ in model.layers], 0, []
    for chunk in chunks:
        outputs.append(model(chunk, caches, seen))
        seen += chunk.size(1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="rolling cache",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
    },
)
