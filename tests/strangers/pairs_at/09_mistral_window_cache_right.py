import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rope(x, positions):
    """x [B, H, T, K], rotate-half layout."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RollingCache:
    """Keys (already rotated) and values of the last WINDOW - 1 tokens of one layer, and how many tokens went by."""

    def __init__(self):
        self.k = self.v = None
        self.seen = 0

    def start(self):
        return self.seen

    def update(self, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        return k, v

    def roll(self, k, v, new):
        self.seen += new
        self.k, self.v = k[:, :, -(WINDOW - 1) :], v[:, :, -(WINDOW - 1) :]


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary positions need an even head width")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, mask=None, cache=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        start = 0 if cache is None else cache.start()
        positions = torch.arange(start, start + T, device=x.device)
        q, k = rope(q, positions), rope(k, positions)
        if cache is not None:
            k, v = cache.update(k, v)
            cache.roll(k, v, T)
        key_positions = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        distance = positions[:, None] - key_positions[None, :]
        allowed = ((distance >= 0) & (distance < WINDOW))[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = RMSNorm(dim)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attention(self.attention_norm(x), mask, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_kv_heads, n_layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def new_caches(self):
        return [RollingCache() for _ in self.layers]

    def forward(self, tokens, mask=None, caches=None):
        h = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, mask, None if caches is None else caches[i])
        return self.output(self.norm(h))


def cached(model, chunks):
    caches = model.new_caches()
    return torch.cat([model(chunk, caches=caches) for chunk in chunks], dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    caches, fresh = (model.new_caches() if use_cache else None), tokens
    for _ in range(steps):
        logits = model(fresh, caches=caches) if use_cache else model(tokens)
        fresh = logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, fresh), dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="Mistral with a rolling cache",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=cached,
    generate=generate,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "grouped_queries": True,
    },
)
