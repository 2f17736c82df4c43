import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'With a cache the rotary positions of each new chunk start again at 0 instead of at the number of '
    'cached tokens, so cached outputs differ from full ones from the second chunk on.'
)
PLACE = 'rotary positions on the cached path of the decoder'


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
    def __init__(self, d, h, groups):
        super().__init__()
        self.h, self.g, self.k_dim = h, groups, d // h
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = nn.Linear(d, groups * self.k_dim, bias=False), nn.Linear(d, groups * self.k_dim, bias=False)

    def forward(self, x, mask=None, cache=None):
        T = x.size(1)
        q = self.q(x).unflatten(-1, (self.h, self.k_dim)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.g, self.k_dim)).transpose(1, 2) for f in (self.k, self.v))
        past = cache["k"].size(2) if cache else 0
        at = torch.arange(past, past + T, device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        S, rep = k.size(2), self.h // self.g
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        y = attend(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), allowed)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
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
    def __init__(self, d, h, groups):
        super().__init__()
        self.h, self.g, self.k_dim = h, groups, d // h
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = nn.Linear(d, groups * self.k_dim, bias=False), nn.Linear(d, groups * self.k_dim, bias=False)

    def forward(self, x, mask=None, cache=None):
        T = x.size(1)
        q = self.q(x).unflatten(-1, (self.h, self.k_dim)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.g, self.k_dim)).transpose(1, 2) for f in (self.k, self.v))
        at = torch.arange(T, device=x.device)
        q, k = rope(q, at), rope(k, at)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        S, rep = k.size(2), self.h // self.g
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        y = attend(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), allowed)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention2(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama2(nn.Module):
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
    build=lambda c: Llama(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "activation": "swiglu", "bias": False},
    domain={"d_model": [16, 32], "num_heads": [2, 4], "num_key_value_heads": [1, 2]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: Llama2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "activation": "swiglu", "bias": False},
    domain={"d_model": [16, 32], "num_heads": [2, 4], "num_key_value_heads": [1, 2]},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)
