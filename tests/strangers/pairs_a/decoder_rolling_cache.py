import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The rolling cache of the sliding-window decoder is cut to the last W keys before a chunk attends '
    'instead of after, so in a chunk of several tokens the earlier queries lose keys of their window (all '
    'of them if the chunk is longer than W); single-token steps are right.'
)
PLACE = 'eviction from the rolling key-value cache of the sliding-window decoder, multi-token chunks'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def rope(x, positions):
    """Rotates channel i of x [B, H, T, K] against channel i + K/2."""
    half = x.size(-1) // 2
    exact = torch.promote_types(x.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = positions.to(exact)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def run_cached(model, chunks, attention_mask=None):
    """Outputs computed chunk by chunk; the mask covers all chunks."""
    caches, outs, seen = model.empty_cache(), [], 0
    for chunk in chunks:
        seen += chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, :seen]
        outs.append(model(chunk, mask, caches))
    return torch.cat(outs, 1)


def generate(model, tokens, steps, use_cache):
    """Greedy."""
    caches, fed = (model.empty_cache(), tokens) if use_cache else (None, tokens)
    for _ in range(steps):
        logits = model(fed, None, caches)
        new = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
        fed = new if use_cache else tokens
    return tokens


class Attention(nn.Module):
    """Output t sees inputs t - 3 .. t; the cache holds no more than a query can still see."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask=None, cache=None):
        T, W = x.size(1), self.window
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        end = (cache["end"] if cache else 0) + T
        at = torch.arange(end - T, end, device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k[:, :, -W:], v=v[:, :, -W:], end=end)
        behind = at[:, None] - torch.arange(end - k.size(2), end, device=x.device)
        allowed = (behind >= 0) & (behind < W)
        if mask is not None:
            allowed = allowed & mask[:, None, None, end - k.size(2) : end]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        return x + self.ff(self.norm2(x))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def empty_cache(self):
        return [{} for _ in self.layers]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, attention_mask, None if caches is None else caches[i])
        return self.head(self.norm(x))


class Attention2(nn.Module):
    """Output t sees inputs t - 3 .. t; the cache holds no more than a query can still see."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask=None, cache=None):
        T, W = x.size(1), self.window
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        end = (cache["end"] if cache else 0) + T
        at = torch.arange(end - T, end, device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            k, v = k[:, :, -W:], v[:, :, -W:]
            cache.update(k=k, v=v, end=end)
        behind = at[:, None] - torch.arange(end - k.size(2), end, device=x.device)
        allowed = (behind >= 0) & (behind < W)
        if mask is not None:
            allowed = allowed & mask[:, None, None, end - k.size(2) : end]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Layer2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention2(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        return x + self.ff(self.norm2(x))


class Mistral2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer2(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def empty_cache(self):
        return [{} for _ in self.layers]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, attention_mask, None if caches is None else caches[i])
        return self.head(self.norm(x))


right = Subject(
    kind="decoder",
    build=lambda c: Mistral(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "window": 4, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "activation": "gelu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: Mistral2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "window": 4, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "activation": "gelu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)
