WHAT = "The position of a new chunk is read off the length of the cached keys (line 84), but the cache is trimmed to the window, so from there on the rotary position stands still and relative distances come out wrong; the uncached forward is right."
"""Mistral-like decoder: RMSNorm, rotary, SwiGLU, a sliding window of 4 and a cache that keeps only what the window needs."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def rope(x, start):
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (torch.arange(x.shape[-2], device=x.device) + start).double()[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Cache:
    """Rotated keys and values of the last WINDOW - 1 tokens of each layer."""

    def __init__(self, layers):
        self.kv = [None] * layers
        self.seen = 0

    def length(self):
        return 0 if self.kv[0] is None else self.kv[0][0].shape[-2]

    def extend(self, layer, k, v):
        if self.kv[layer] is not None:
            k = torch.cat((self.kv[layer][0], k), dim=-2)
            v = torch.cat((self.kv[layer][1], v), dim=-2)
        self.kv[layer] = k[..., -(WINDOW - 1) :, :], v[..., -(WINDOW - 1) :, :]
        return k, v


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.norm_1, self.norm_2 = RMSNorm(d), RMSNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d, bias=False)

    def forward(self, x, start, cache):
        B, T, D = x.shape
        h = self.norm_1(x)
        q, k, v = (w(h).view(B, T, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, start), rope(k, start)
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        S = k.shape[-2]
        behind = torch.arange(S - T, S, device=x.device)[:, None] - torch.arange(S, device=x.device)
        allowed = (behind >= 0) & (behind < WINDOW)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        h = self.norm_2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistralette(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff):
        super().__init__()
        if (d // heads) % 2:
            raise ValueError("rotary needs an even head dim")
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Layer(d, heads, d_ff, i) for i in range(layers)])
        self.norm = RMSNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, start, cache)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.head(self.norm(x))


def cached(model, chunks):
    cache = Cache(len(model.layers))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="sliding window with a cache",
    build=lambda c: Mistralette(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
    },
)
