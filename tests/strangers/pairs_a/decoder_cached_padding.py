import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "On the cached path only the current chunk's part of the padding mask is used and all cached "
    'positions count as real, so padding of earlier chunks becomes visible to later tokens.'
)
PLACE = 'padding mask over cached positions in the decoder'


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


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, mask=None, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = cache["k"].size(2) if cache else 0
        at = torch.arange(past, past + x.size(1), device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class NeoX(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.emb = nn.Embedding(c.vocab_size, d)
        self.attns = nn.ModuleList(Attention(d, c.num_heads) for _ in range(c.num_layers))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d)) for _ in range(c.num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1))
        self.head = nn.Linear(d, c.vocab_size, bias=False)

    def empty_cache(self):
        return [{} for _ in self.attns]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, (attn, ff) in enumerate(zip(self.attns, self.ffs)):
            x = x + attn(self.norms[2 * i](x), attention_mask, None if caches is None else caches[i])
            x = x + ff(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class Attention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, mask=None, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = cache["k"].size(2) if cache else 0
        at = torch.arange(past, past + x.size(1), device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if mask is not None:
            mask = F.pad(mask[:, -T:], (S - T, 0), value=True)
            allowed = allowed & mask[:, None, None, :]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class NeoX2(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.emb = nn.Embedding(c.vocab_size, d)
        self.attns = nn.ModuleList(Attention2(d, c.num_heads) for _ in range(c.num_layers))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d)) for _ in range(c.num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1))
        self.head = nn.Linear(d, c.vocab_size, bias=False)

    def empty_cache(self):
        return [{} for _ in self.attns]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, (attn, ff) in enumerate(zip(self.attns, self.ffs)):
            x = x + attn(self.norms[2 * i](x), attention_mask, None if caches is None else caches[i])
            x = x + ff(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


right = Subject(
    kind="decoder",
    build=lambda c: NeoX(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: NeoX2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    mask_forms=("padding",),
)
